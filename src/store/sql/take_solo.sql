-- Take one block that must run with nothing else in its process. Its holder waits until it is alone before it starts.
--
-- $1 queue, $2 worker, $3 token, $4 commands, $5 commands whose claims are to be durable.
WITH s AS MATERIALIZED (
    SELECT pg_catalog.set_config('synchronous_commit', 'off', true)
     -- A worker that was declared dead and does not know it yet claims nothing.
     WHERE NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = $2 AND w.state = 'dead')),
due AS MATERIALIZED (
    SELECT f.id, b.uid
      FROM musterd.blocks f
      JOIN musterd.batches b ON b.id = f.batch_id AND b.open, s
     WHERE f.worker IS NULL AND f.crashes > 0 AND f.solo
       AND f.queue = $1 AND f.available_at <= pg_catalog.now() AND f.command = ANY ($4)
       AND NOT EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = $1)
       AND NOT EXISTS (SELECT FROM musterd.blocks o WHERE o.worker = $2 AND o.solo)
     ORDER BY f.priority, f.available_at
     LIMIT 1
       FOR UPDATE OF f SKIP LOCKED)
UPDATE musterd.blocks x
   SET worker = $2, token = $3, claimed_at = pg_catalog.now()
  FROM due d
 WHERE x.id = d.id AND x.id = ANY (ARRAY (SELECT c.id FROM due c))
RETURNING x.id, x.token, x.batch_id, d.uid, x.lines, x.generation, x.command, x.attempt, x.solo, x.crashes,
          EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - x.available_at)::float8 AS waited,
          CASE WHEN x.command = ANY ($5::text[]) THEN pg_catalog.set_config('synchronous_commit', 'on', true) END
