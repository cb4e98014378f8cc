-- Which processes live.
--
-- KEYS[1]  sorted set: PROCESS by expiry, in milliseconds of Redis's clock
-- ARGV     1 process, 2 lease in ms, 3 whether it leaves
-- returns  how many there are
local key, process, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
redis.call('ZREMRANGEBYSCORE', key, now + lease + 1, '+inf') -- the clock was set back
if ARGV[3] == '0' then
  redis.call('ZADD', key, now + lease, process)
  redis.call('PEXPIRE', key, 2 * lease)
else
  redis.call('ZREM', key, process)
end
return redis.call('ZCARD', key)
