-- One step of a window or budget: books corrections, then grants what fits. Runs as a whole or not at all.
--
-- KEYS[1]  hash: last (number of the current slice), used (sum of all slices), 0..60 (what was spent in each slice),
--          of:PROCESS (its latest step, as seq:granted:slice)
-- ARGV     1 process, 2 seq, 3 count, 4 seconds of the window or 0 for a budget, 5 number of the budget's period,
--          6 life of the key in ms, 7 divisor and 8 wish (how much may be granted beyond the costs),
--          9 whether the process must be known here, 10 number of corrections,
--          then slice and difference of each correction (a slice <= 0 counts back from now), then the costs
-- returns  granted, its slice, microseconds left of that slice, used,
--          then for each cost 0 if it was granted, or the microseconds until it fits;
--          or -1 alone, when the process must be known and is not: Redis has lost its memory. Nothing is done then.
local SIZE = 61
local key, process, seq = KEYS[1], 'of:' .. ARGV[1], tonumber(ARGV[2])
local count, seconds = tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local ticks = time[1] * 60 + time[2] * 60 / 1000000 -- sixtieths of a second: whole seconds stay exact
local current = tonumber(ARGV[5])
if seconds > 0 then
  current = math.floor(ticks / seconds)
end

local state = redis.call('HMGET', key, 'last', 'used', process)
if ARGV[9] == '1' and not state[3] then
  return {-1}
end
local last, used = tonumber(state[1]) or current, tonumber(state[2]) or 0

local function places(from, to)
  local found = {}
  for number = from, to do
    found[#found + 1] = number % SIZE
  end
  return found
end

if current - last >= SIZE then
  redis.call('HDEL', key, unpack(places(0, SIZE - 1)))
  used, last = 0, current
elseif current > last then
  local leaving = places(last + 1, current)
  for _, value in ipairs(redis.call('HMGET', key, unpack(leaving))) do
    used = used - (tonumber(value) or 0)
  end
  redis.call('HDEL', key, unpack(leaving))
  last = current
elseif current < last - 1 then
  -- The clock was set back. What was spent counts for one more window: nobody knows any more when it was.
  redis.call('HDEL', key, unpack(places(0, SIZE - 1)))
  redis.call('HSET', key, current % SIZE, used)
  last = current
end

if seconds > 0 and not state[3] then
  -- A process that comes is the occasion to forget those that have gone: they leave nothing else behind.
  local all = redis.call('HGETALL', key)
  for index = 1, #all, 2 do
    local slice = string.match(all[index + 1], '^%d+:%d+:(%d+)$')
    if slice and tonumber(slice) <= last - SIZE then
      redis.call('HDEL', key, all[index])
    end
  end
end

local rest = 0
if seconds > 0 then
  rest = math.floor(math.min((last + 1) * seconds - ticks, seconds) / 60 * 1000000)
end

local granted, slice, waits = 0, last, {}
local old_seq, old_granted, old_slice = string.match(state[3] or '', '^(%d+):(%d+):(%d+)$')
if old_seq and tonumber(old_seq) >= seq then
  -- This very step was taken before and its answer got lost, or it comes too late: it changes nothing.
  granted, slice = tonumber(old_granted), tonumber(old_slice)
  if slice ~= last then
    rest = 0
  end
else
  local next_argument = 11
  for _ = 1, tonumber(ARGV[10]) do
    local number, difference = tonumber(ARGV[next_argument]), tonumber(ARGV[next_argument + 1])
    next_argument = next_argument + 2
    if number <= 0 then
      number = last + number
    elseif number > last and difference > 0 then
      number = last
    end
    if number <= last and last - number < SIZE then
      redis.call('HINCRBY', key, number % SIZE, difference)
      used = used + difference
    end
  end
  local refused, largest = {}, 0
  for index = next_argument, #ARGV do
    local cost = tonumber(ARGV[index])
    waits[#waits + 1] = 0
    largest = math.max(largest, cost)
    if used + cost <= count then
      used, granted = used + cost, granted + cost
    else
      refused[#waits] = cost
    end
  end
  local divisor = tonumber(ARGV[7])
  local extra = math.floor(math.min(tonumber(ARGV[8]), (count - used) / divisor))
  if extra > 0 and count - used >= divisor * largest then -- else others might be refused for what lies in store
    used, granted = used + extra, granted + extra
  end
  if granted > 0 then
    redis.call('HINCRBY', key, last % SIZE, granted)
  end
  if next(refused) and seconds == 0 then
    for index in pairs(refused) do
      waits[index] = 1
    end
  elseif next(refused) then
    local ring = redis.call('HMGET', key, unpack(places(last - SIZE + 1, last)))
    for index, cost in pairs(refused) do
      local missing, place = used + cost - count, 1
      while missing > 0 and place <= SIZE do
        missing = missing - (tonumber(ring[place]) or 0)
        place = place + 1
      end
      -- The slice at `place - 1` leaves when the one SIZE after it begins.
      local leaves = (last - SIZE + place - 1 + SIZE) * seconds - ticks
      waits[index] = math.max(1, math.ceil((missing > 0 and seconds * 60 or leaves) / 60 * 1000000))
    end
  end
  redis.call('HSET', key, process, string.format('%.0f:%.0f:%.0f', seq, granted, slice))
end

redis.call('HSET', key, 'last', last, 'used', used)
redis.call('PEXPIRE', key, ARGV[6])
return {granted, slice, rest, used, unpack(waits)}
