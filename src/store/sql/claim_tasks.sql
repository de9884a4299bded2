-- Claim due tasks: one for every token.
--
-- $1 queue, $2 worker, $3 tokens, $4 commands, $5 the scope a structured queue works on (null: any task; 0: top-level ones).
-- Committed synchronously: a procedure that crashes the server must not take its own claim with it and run for ever.
WITH due AS MATERIALIZED (
    SELECT t.id
      FROM musterd.tasks t
     WHERE t.queue = $1 AND t.state = 'queued' AND t.command = ANY ($4::text[])
       AND ($5::bigint IS NULL OR COALESCE(t.parent_id, 0) = $5)
       AND NOT EXISTS (SELECT FROM musterd.queues q WHERE q.name = $1 AND q.paused)
     ORDER BY /*order*/ t.id
     LIMIT 8
       FOR NO KEY UPDATE OF t SKIP LOCKED)
UPDATE musterd.tasks x
   SET state = 'running', worker = $2, token = c.token, claimed_at = pg_catalog.now()
  FROM (SELECT d.id, pg_catalog.row_number() OVER () AS n FROM due d) d
  JOIN pg_catalog.unnest($3::uuid[]) WITH ORDINALITY c (token, n) USING (n)
 WHERE x.id = d.id AND x.state = 'queued'
RETURNING x.id, x.token, x.parent_id, x.queue, x.command, x.payload, x.attempt, x.max_attempts, x.traceparent,
          (EXTRACT(EPOCH FROM x.timeout) * 1000)::bigint AS timeout_ms
