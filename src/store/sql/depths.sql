-- How much waits in each queue, and since when.
--
-- $1 queues, $2 where a count ends. Every branch goes through a partial index of what waits: batches_carve, blocks_free,
-- tasks_due, tasks_scheduled. None reads a row of a batch.
SELECT q.name AS queue,
       COALESCE(b.rows, 0) + COALESCE(k.rows, 0) AS rows,
       t.count AS tasks_queued,
       s.count AS tasks_scheduled,
       EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - LEAST(b.oldest, k.oldest, t.oldest, d.oldest))::float8 AS oldest_due
  FROM pg_catalog.unnest($1::text[]) q (name)
 CROSS JOIN LATERAL (
       SELECT pg_catalog.sum(o.rows)::bigint AS rows,
              (SELECT pg_catalog.min(p.run_at) FROM musterd.tasks p WHERE p.id = pg_catalog.min(o.id)) AS oldest
         FROM (SELECT c.id, c.rows - c.next_line + 1 AS rows FROM musterd.batches c
                WHERE c.queue = q.name AND c.open AND c.next_line <= c.rows LIMIT $2) o) b
 CROSS JOIN LATERAL (
       SELECT pg_catalog.sum(o.rows)::bigint AS rows,
              pg_catalog.min(o.available_at) FILTER (WHERE o.available_at <= pg_catalog.now()) AS oldest
         FROM (SELECT f.rows, f.available_at
                 FROM musterd.blocks f
                WHERE f.queue = q.name AND f.worker IS NULL
                  -- What is held does not wait.
                  AND EXISTS (SELECT FROM musterd.batches h WHERE h.id = f.batch_id AND h.open) LIMIT $2) o) k
 CROSS JOIN LATERAL (
       SELECT pg_catalog.count(*) AS count, pg_catalog.min(GREATEST(o.run_at, o.created_at)) AS oldest
         FROM (SELECT w.run_at, w.created_at FROM musterd.tasks w
                WHERE w.queue = q.name AND w.state = 'queued' LIMIT $2) o) t
 CROSS JOIN LATERAL (
       SELECT pg_catalog.count(*) AS count
         FROM (SELECT FROM musterd.tasks w WHERE w.queue = q.name AND w.state = 'scheduled' LIMIT $2) o) s
 CROSS JOIN LATERAL (
       SELECT pg_catalog.min(w.run_at) AS oldest FROM musterd.tasks w
        WHERE w.queue = q.name AND w.state = 'scheduled' AND w.run_at <= pg_catalog.now()) d
