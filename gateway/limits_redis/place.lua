-- How many slots of a name a process holds. It says what it needs; the answer says what it has. Saying it twice is safe.
--
-- KEYS[1]  hash: PROCESS -> slots:expiry:seq, the expiry in milliseconds of Redis's clock
-- ARGV     1 process, 2 seq, 3 base (slots it keeps in any case), 4 how many more it waits for, 5 wish and 6 divisor
--          (how many it would keep in store), 7 most, 8 lease in ms
-- returns  slots it holds now, slots that the others hold
local key, process, seq = KEYS[1], ARGV[1], tonumber(ARGV[2])
local base, most, lease = tonumber(ARGV[3]), tonumber(ARGV[7]), tonumber(ARGV[8])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local others = 0
local all = redis.call('HGETALL', key)
for index = 1, #all, 2 do
  local slots, expiry, said = string.match(all[index + 1], '^(%d+):(%d+):(%d+)$')
  if all[index] == process then
    if tonumber(said) >= seq then
      return {tonumber(slots), 0} -- it comes too late: what was said since counts, and nobody reads this answer
    end
  elseif tonumber(expiry) <= now then
    redis.call('HDEL', key, all[index])
  else
    others = others + tonumber(slots)
    if tonumber(expiry) > now + lease then -- the clock was set back: the dead must not live on until it catches up
      redis.call('HSET', key, all[index], string.format('%s:%.0f:%s', slots, now + lease, said))
    end
  end
end

local free = math.max(0, most - others - base)
local granted = math.min(tonumber(ARGV[4]), free)
local extra = math.min(tonumber(ARGV[5]), math.floor((free - granted) / tonumber(ARGV[6])))
local mine = base + granted + extra
redis.call('HSET', key, process, string.format('%.0f:%.0f:%.0f', mine, now + lease, seq))
redis.call('PEXPIRE', key, 2 * lease)
return {mine, others}
