-- Take one task that must run with nothing else in its process. Its holder waits until it is alone before it starts.
--
-- $1 queue, $2 worker, $3 token, $4 commands.
WITH due AS MATERIALIZED (
    SELECT t.id
      FROM musterd.tasks t
     WHERE t.queue = $1 AND t.state = 'queued' AND t.crashes > 0 AND t.crashes >= 2 AND t.command = ANY ($4::text[])
       AND NOT EXISTS (SELECT FROM musterd.queues q WHERE q.name = $1 AND q.paused)
       AND NOT EXISTS (SELECT FROM musterd.tasks o WHERE o.worker = $2 AND o.crashes >= 2)
     ORDER BY t.priority, t.id
     LIMIT 1
       FOR NO KEY UPDATE OF t SKIP LOCKED)
UPDATE musterd.tasks x
   SET state = 'running', worker = $2, token = $3, claimed_at = pg_catalog.now(), alone_at = NULL
  FROM due d
 WHERE x.id = d.id AND x.state = 'queued' AND x.id = ANY (ARRAY (SELECT c.id FROM due c))
RETURNING x.id, x.token, x.parent_id, x.queue, x.command, x.payload, x.attempt, x.max_attempts, x.crashes, x.solo_crashes,
          x.traceparent, (EXTRACT(EPOCH FROM x.timeout) * 1000)::bigint AS timeout_ms,
          EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - GREATEST(x.run_at, x.created_at))::float8 AS waited
