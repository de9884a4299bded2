-- How much waits in each queue, and since when.
--
-- $1 queues, $2 where a count ends. Every branch goes through a partial index of what waits: batches_carve, blocks_free,
-- task_tickets_ready, tasks_open. None reads a row of a batch.
SELECT q.name AS queue,
       COALESCE(b.rows, 0) + COALESCE(k.rows, 0) AS rows,
       t.count AS tasks_queued,
       s.count AS tasks_scheduled,
       EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - LEAST(b.oldest, k.oldest, t.oldest))::float8 AS oldest_due
  FROM pg_catalog.unnest($1::text[]) q (name)
 CROSS JOIN LATERAL (
       SELECT pg_catalog.sum(o.rows)::bigint AS rows,
              (SELECT pg_catalog.min(p.run_at) FROM musterd.task_records p WHERE p.id = pg_catalog.min(o.id)) AS oldest
         FROM (SELECT c.id, c.rows - c.next_line + 1 AS rows FROM musterd.batches c
                WHERE c.queue = q.name AND c.open AND c.next_line <= c.rows AND NOT c.canary_only LIMIT $2) o) b
 CROSS JOIN LATERAL (
       SELECT pg_catalog.sum(o.rows)::bigint AS rows,
              pg_catalog.min(o.available_at) FILTER (WHERE o.available_at <= pg_catalog.now()) AS oldest
         FROM (SELECT f.rows, f.available_at
                 FROM musterd.blocks f
                WHERE f.queue = q.name AND f.worker IS NULL
                  -- What is held does not wait.
                  AND EXISTS (SELECT FROM musterd.batches h WHERE h.id = f.batch_id AND h.open) LIMIT $2) o) k
 CROSS JOIN LATERAL (
       -- Those that workers hold are due, too, and do not wait.
       SELECT GREATEST(pg_catalog.count(*) - (SELECT COALESCE(pg_catalog.sum(c.open), 0) FROM musterd.task_claims c WHERE c.queue = q.name), 0)::bigint
                  AS count,
              pg_catalog.min(o.due) FILTER (WHERE NOT o.held) AS oldest
         FROM (SELECT GREATEST(w.run_at, w.created_at) AS due,
                      EXISTS (SELECT FROM musterd.task_claims c WHERE c.tasks @> w.id AND c.number = w.ticket) AS held
                 FROM musterd.task_records w
                WHERE w.queue = q.name AND musterd.is_open(w.state) AND w.run_at <= pg_catalog.now()
                ORDER BY w.run_at LIMIT $2) o) t
 CROSS JOIN LATERAL (
       SELECT pg_catalog.count(*) AS count
         FROM (SELECT FROM musterd.task_records w
                WHERE w.queue = q.name AND musterd.is_open(w.state) AND w.run_at > pg_catalog.now() LIMIT $2) o) s
