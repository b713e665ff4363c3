"""The Lua that makes each step of the store atomic, and the keys it keeps.

Keys of a run, all under `farmhand:{run}:`

    config              JSON of the rollout config
    stream              records not yet acknowledged, field `r`
    quarantine          list of records that did not decode, at most `QUARANTINE_KEPT`
    open                zset of unended episodes by order of submission (`seq` counts)
    due                 zset of unended episodes by the time (ms, server's clock) at which `sweep` looks at them:
                        a lease's end, 0 when released or doomed, or when the last offer has gone unheard
    episode:{id}        hash: order max attempt deaths worker n point doom, and base: n when claimed
    segments:{id}       list of the episode's segments, for resumption
    ended:{id}          attempt that ended it, kept for `ENDED_KEPT_S` so that late calls and submits find it closed

`worker` is empty when nobody holds the lease. `doom` is "kind:message" of an episode that must end as failed but whose
`EpisodeEnd` is not written yet: it takes two steps, as only Python encodes records, and a sweep completes what a crash left.
A script that runs twice after a broken connection does what it did the first time. Keys are made inside the scripts, so one
server holds a run; a Redis cluster does not.
"""

from rollout.valkey_client import Script

ENDED_KEPT_S = 86_400
QUARANTINE_KEPT = 1000

_NOW = """
local function ms() local t = redis.call('TIME'); return t[1] * 1000 + math.floor(t[2] / 1000) end
local now = ms()
local function due(p, id, at) redis.call('ZADD', p .. 'due', string.format('%d', at), id) end
local function over(p, id, attempt)
  redis.call('SET', p .. 'ended:' .. id, attempt, 'EX', ENDED)
  redis.call('DEL', p .. 'episode:' .. id, p .. 'segments:' .. id)
  redis.call('ZREM', p .. 'due', id)
  redis.call('ZREM', p .. 'open', id)
end
""".replace("ENDED", str(ENDED_KEPT_S))

SUBMIT = Script(
    _NOW
    + """
local p, offer = ARGV[1], tonumber(ARGV[2])
for i = 3, #ARGV, 3 do
  local id, max, order = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('EXISTS', p .. 'episode:' .. id, p .. 'ended:' .. id) == 0 then
    redis.call('HSET', p .. 'episode:' .. id, 'order', order, 'max', max, 'attempt', 0, 'deaths', 0, 'worker', '', 'n', 0)
    redis.call('ZADD', p .. 'open', redis.call('INCR', p .. 'seq'), id)
    due(p, id, now + offer)
  end
end
"""
)

CLAIM = Script(
    _NOW
    + """
local p, id, token, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local h = p .. 'episode:' .. id
local s = redis.call('HMGET', h, 'order', 'max', 'attempt', 'deaths', 'worker', 'doom', 'point')
if not s[1] or s[6] then return false end
local attempt = s[3]
if s[5] ~= token then
  if s[5] ~= '' then
    local ends = redis.call('ZSCORE', p .. 'due', id)
    if ends and tonumber(ends) > now then return false end
    local deaths = redis.call('HINCRBY', h, 'deaths', 1)
    if deaths >= tonumber(s[2]) then
      redis.call('HSET', h, 'worker', '', 'doom', 'lost:' .. s[5])
      due(p, id, 0)
      return false
    end
  end
  attempt = redis.call('HINCRBY', h, 'attempt', 1)
  redis.call('HSET', h, 'worker', token, 'base', redis.call('HGET', h, 'n'))
end
due(p, id, now + ttl)
return {s[1], tostring(attempt), s[7] or '', redis.call('LRANGE', p .. 'segments:' .. id, 0, -1)}
"""
)

COMMIT_FIELDS = 8
COMMIT = Script(
    _NOW
    + """
local out = {}
for i = 1, #ARGV, 8 do
  local op, p, id, attempt, index = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], tonumber(ARGV[i + 4])
  local ttl, point, data = tonumber(ARGV[i + 5]), ARGV[i + 6], ARGV[i + 7]
  local h, list = p .. 'episode:' .. id, p .. 'segments:' .. id
  local s = redis.call('HMGET', h, 'attempt', 'worker', 'n', 'doom', 'base')
  local answer = 'ok'
  if s[1] ~= attempt or s[2] == '' or s[4] then
    if op ~= 'end' or redis.call('GET', p .. 'ended:' .. id) ~= attempt then answer = 'lost' end
  elseif op == 'point' then
    redis.call('HSET', h, 'point', point)
    due(p, id, now + ttl)
  elseif op == 'restart' then
    if s[3] == s[5] then
      redis.call('DEL', list)
      redis.call('HDEL', h, 'point')
      redis.call('HSET', h, 'n', 0, 'base', 0)
      due(p, id, now + ttl)
    else
      answer = 'late'
    end
  else
    local n = tonumber(s[3])
    if index > n then
      due(p, id, 0)
      answer = 'gap' .. n
    elseif op == 'end' then
      if index == n then
        redis.call('XADD', p .. 'stream', '*', 'r', data)
        over(p, id, attempt)
      else
        answer = 'again' .. n
      end
    elseif index == n then
      redis.call('XADD', p .. 'stream', '*', 'r', data)
      redis.call('RPUSH', list, data)
      redis.call('HSET', h, 'n', n + 1, 'point', point)
      due(p, id, now + ttl)
    elseif index == n - 1 and redis.call('LINDEX', list, -1) == data then
      redis.call('HSET', h, 'point', point)
      due(p, id, now + ttl)
    else
      answer = 'again' .. n
    end
  end
  out[#out + 1] = answer
end
return out
"""
)

RENEW = Script(
    _NOW
    + """
local p, out = ARGV[1], {}
for i = 2, #ARGV, 3 do
  local s = redis.call('HMGET', p .. 'episode:' .. ARGV[i], 'attempt', 'worker', 'doom')
  local held = s[1] == ARGV[i + 1] and s[2] ~= '' and not s[3]
  if held then due(p, ARGV[i], now + tonumber(ARGV[i + 2])) end
  out[#out + 1] = held and 1 or 0
end
return out
"""
)

RELEASE = Script(
    _NOW
    + """
local p, id = ARGV[1], ARGV[2]
local h = p .. 'episode:' .. id
local s = redis.call('HMGET', h, 'attempt', 'worker', 'doom')
if s[1] ~= ARGV[3] or s[3] then return 0 end
if s[2] ~= '' then
  redis.call('HSET', h, 'worker', '')
  due(p, id, 0)
end
return 1
"""
)

SWEEP = Script(
    _NOW
    + """
local p, offer = ARGV[1], tonumber(ARGV[2])
local ids = redis.call('ZRANGEBYSCORE', p .. 'due', '-inf', string.format('%d', now), 'LIMIT', 0, ARGV[3])
local offers, doomed = {}, {}
for _, id in ipairs(ids) do
  local h = p .. 'episode:' .. id
  local s = redis.call('HMGET', h, 'order', 'max', 'attempt', 'deaths', 'worker', 'doom', 'n')
  local doom = s[6]
  if not doom and s[5] ~= '' then
    local deaths = redis.call('HINCRBY', h, 'deaths', 1)
    redis.call('HSET', h, 'worker', '')
    if deaths >= tonumber(s[2]) then
      doom = 'lost:' .. s[5]
      redis.call('HSET', h, 'doom', doom)
    end
  end
  if doom then
    doomed[#doomed + 1] = {id, s[3], s[7], doom}
  else
    due(p, id, now + offer)
    offers[#offers + 1] = s[1]
  end
end
return {offers, doomed, #ids}
"""
)

DOOM = Script(
    _NOW
    + """
local p, doom, doomed = ARGV[1], ARGV[2], {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local h = p .. 'episode:' .. id
  local s = redis.call('HMGET', h, 'attempt', 'n', 'doom')
  if s[1] then
    if not s[3] then
      redis.call('HSET', h, 'worker', '', 'doom', doom)
      due(p, id, 0)
    end
    doomed[#doomed + 1] = {id, s[1], s[2], s[3] or doom}
  end
end
return doomed
"""
)

END_DOOMED = Script(
    _NOW
    + """
local p = ARGV[1]
for i = 2, #ARGV, 2 do
  local id, data = ARGV[i], ARGV[i + 1]
  if redis.call('HEXISTS', p .. 'episode:' .. id, 'doom') == 1 then
    redis.call('XADD', p .. 'stream', '*', 'r', data)
    over(p, id, '')
  end
end
"""
)

QUARANTINE = Script(
    """
local p = ARGV[1]
redis.pcall('LREM', p .. 'quarantine', 0, ARGV[3])
redis.pcall('RPUSH', p .. 'quarantine', ARGV[3])
redis.pcall('LTRIM', p .. 'quarantine', -KEPT, -1)
redis.call('XDEL', p .. 'stream', ARGV[2])
redis.pcall('XACK', p .. 'stream', 'learner', ARGV[2])
""".replace("KEPT", str(QUARANTINE_KEPT))
)
