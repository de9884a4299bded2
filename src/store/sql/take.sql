-- Take free blocks that are due: retries, given back, recovered.
--
-- $1 queue, $2 worker, $3 tokens, $4 commands, $5 the scope a structured queue works on (null: any), $6 commands of tasks that go
-- before rows of a worse priority (null: none do), $7 commands whose claims are to be durable. Due times are
-- real; whether the batch is open and the queue is not paused is asked here and nowhere before.
--
-- Of the suspects (blocks some process died with) a worker holds one at a time: should it die again, few are to blame.
WITH s AS MATERIALIZED (
    SELECT pg_catalog.set_config('synchronous_commit', 'off', true)
     -- A worker that was declared dead and does not know it yet claims nothing.
     WHERE NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = $2 AND w.state = 'dead')),
suspect AS MATERIALIZED (
    SELECT f.id, f.priority, f.available_at, b.uid
      FROM musterd.blocks f
      JOIN musterd.batches b ON b.id = f.batch_id AND b.open, s
     WHERE f.worker IS NULL AND f.crashes > 0 AND NOT f.solo
       AND f.queue = $1 AND f.available_at <= pg_catalog.now() AND f.command = ANY ($4)
       AND NOT EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = $1)
       AND NOT EXISTS (SELECT FROM musterd.blocks o WHERE o.worker = $2 AND o.crashes > 0)
       AND ($5::bigint IS NULL OR b.id = $5
            OR EXISTS (SELECT FROM musterd.task_records p WHERE p.id = b.id AND p.parent_id = $5))
       /*limit*/
     ORDER BY /*order*/ f.available_at
     LIMIT 1
       FOR UPDATE OF f SKIP LOCKED),
due AS MATERIALIZED (
    SELECT f.id, f.priority, f.available_at, b.uid
      FROM musterd.blocks f
      JOIN musterd.batches b ON b.id = f.batch_id AND b.open, s
     WHERE f.worker IS NULL AND f.crashes = 0
       AND f.queue = $1 AND f.available_at <= pg_catalog.now() AND f.command = ANY ($4)
       AND NOT EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = $1)
       AND ($5::bigint IS NULL OR b.id = $5
            OR EXISTS (SELECT FROM musterd.task_records p WHERE p.id = b.id AND p.parent_id = $5))
       AND ($6::text[] IS NULL OR f.priority <= COALESCE((
            SELECT pg_catalog.min(h.priority) FROM pg_catalog.unnest($6) c (command)
             CROSS JOIN LATERAL (SELECT t.priority FROM musterd.task_tickets t
                                  WHERE t.queue = $1 AND t.command = c.command AND t.ready AND t.crashes = 0
                                    AND ($5::bigint IS NULL OR t.parent_id = $5)
                                  ORDER BY t.priority LIMIT 1) h), 2147483647))
       /*limit*/
     ORDER BY /*order*/ f.available_at
     LIMIT 8
       FOR UPDATE OF f SKIP LOCKED),
chosen AS (
    SELECT f.id, f.uid, pg_catalog.row_number() OVER (ORDER BY /*order*/ f.available_at) AS n
      FROM (SELECT * FROM suspect UNION ALL SELECT * FROM due) f)
UPDATE musterd.blocks x
   SET worker = $2, token = t.token, claimed_at = pg_catalog.now()
  FROM chosen d
  JOIN pg_catalog.unnest($3::uuid[]) WITH ORDINALITY t (token, n) USING (n)
 -- Once more as an array: whatever the size of the table when this was planned, it is looked up and not walked through.
 WHERE x.id = d.id AND x.id = ANY (ARRAY (SELECT c.id FROM chosen c))
RETURNING x.id, x.token, x.batch_id, d.uid, x.lines, x.generation, x.command, x.attempt, x.solo, x.crashes,
          EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - x.available_at)::float8 AS waited,
          CASE WHEN x.command = ANY ($7::text[]) THEN pg_catalog.set_config('synchronous_commit', 'on', true) END
