-- Claim due tasks: one for every token.
--
-- $1 queue, $2 worker, $3 tokens, $4 commands, $5 the scope a structured queue works on (null: any), $6 commands of rows that go
-- before tasks of a worse priority (null: none do).
-- Committed synchronously: a procedure that crashes the server must not take its own claim with it and run for ever.
--
-- Of the suspects (tasks some process died with) a worker holds one at a time: should it die again, few are to blame. Those with
-- two deaths behind them run alone; take_solo_task.sql takes them.
WITH suspect AS MATERIALIZED (
    SELECT t.id
      FROM musterd.tasks t
     WHERE t.queue = $1 AND t.state = 'queued' AND t.crashes > 0 AND t.crashes < 2 AND t.command = ANY ($4::text[])
       /*scope*/
       AND NOT EXISTS (SELECT FROM musterd.queues q WHERE q.name = $1 AND q.paused)
       AND NOT EXISTS (SELECT FROM musterd.tasks o WHERE o.worker = $2 AND o.crashes > 0)
     ORDER BY /*order*/ t.id
     LIMIT 1
       FOR NO KEY UPDATE OF t SKIP LOCKED),
due AS MATERIALIZED (
    SELECT t.id
      FROM musterd.tasks t
     WHERE t.queue = $1 AND t.state = 'queued' AND t.crashes = 0 AND t.command = ANY ($4::text[])
       /*scope*/
       AND NOT EXISTS (SELECT FROM musterd.queues q WHERE q.name = $1 AND q.paused)
       AND ($6::text[] IS NULL OR t.priority <= LEAST(
            (SELECT b.priority FROM musterd.batches b
              WHERE b.queue = $1 AND b.open AND b.next_line <= b.rows AND b.command = ANY ($6)
                AND ($5::bigint IS NULL OR EXISTS (SELECT FROM musterd.tasks p WHERE p.id = b.id AND p.parent_id = $5))
              ORDER BY b.priority LIMIT 1),
            (SELECT f.priority FROM musterd.blocks f
              WHERE f.worker IS NULL AND f.queue = $1 AND f.available_at <= pg_catalog.now() AND f.command = ANY ($6)
                AND ($5::bigint IS NULL OR EXISTS (SELECT FROM musterd.tasks p WHERE p.id = f.batch_id AND p.parent_id = $5))
              ORDER BY f.priority LIMIT 1),
            2147483647))
     ORDER BY /*order*/ t.id
     -- As many as are claimed and no more: what is locked here in passing, another replica does not see.
     LIMIT /*count*/ - (SELECT pg_catalog.count(*) FROM suspect)
       FOR NO KEY UPDATE OF t SKIP LOCKED)
UPDATE musterd.tasks x
   SET state = 'running', worker = $2, token = c.token, claimed_at = pg_catalog.now(), alone_at = NULL
  FROM (SELECT d.id, pg_catalog.row_number() OVER () AS n FROM (SELECT id FROM suspect UNION ALL SELECT id FROM due) d) d
  JOIN pg_catalog.unnest($3::uuid[]) WITH ORDINALITY c (token, n) USING (n)
 WHERE x.id = d.id AND x.state = 'queued'
   AND x.id = ANY (ARRAY (SELECT id FROM suspect UNION ALL SELECT id FROM due))
RETURNING x.id, x.token, x.parent_id, x.queue, x.command, x.payload, x.attempt, x.max_attempts, x.crashes, x.solo_crashes,
          x.traceparent, (EXTRACT(EPOCH FROM x.timeout) * 1000)::bigint AS timeout_ms,
          EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - GREATEST(x.run_at, x.created_at))::float8 AS waited
