-- Free blocks whose holders are dead; the caller has locked them in the statement before.
--
-- $1 block ids, $2 tokens, $3 max_crashes. Answers with one row per block: batch, queue, lines freed, lines failed.
--
-- What had started is suspect: its open lines come back in eighths, so that the line that kills is soon alone. A single
-- line with two deaths behind it is to run with nothing beside it, and only deaths in such a try count against it.
WITH dead AS MATERIALIZED (
    SELECT b.id, b.batch_id, b.first_line, b.last_line, b.lines, b.queue, b.command, b.priority, b.attempt, b.crashes, b.solo,
           b.solo_crashes, b.alone_at IS NOT NULL AS alone,
           -- A zombie may claim after its end was declared; what it claimed then has harmed nobody.
           NOT COALESCE(b.claimed_at > w.ended_at, false) AS started,
           x.open AS batch_open, COALESCE(x.aborting, true) AS dropped
      FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) AS g (id, token)
      JOIN musterd.blocks b ON b.id = g.id AND b.token = g.token
      LEFT JOIN musterd.workers w ON w.id = b.worker
      LEFT JOIN musterd.batches x ON x.id = b.batch_id),
gone AS (
    DELETE FROM musterd.blocks b USING dead d WHERE b.id = d.id),
open_lines AS (
    SELECT d.id, d.started, l.line,
           pg_catalog.row_number() OVER (PARTITION BY d.id ORDER BY l.line) - 1 AS place,
           pg_catalog.count(*) OVER (PARTITION BY d.id) AS total
      FROM dead d
     CROSS JOIN LATERAL (
           SELECT pg_catalog.unnest(d.lines) WHERE d.lines IS NOT NULL
           UNION ALL
           SELECT pg_catalog.generate_series(d.first_line, d.last_line) WHERE d.lines IS NULL) l (line)
     WHERE NOT d.dropped
       AND NOT EXISTS (SELECT FROM musterd.results r WHERE r.batch_id = d.batch_id AND r.line = l.line)),
pieces AS (
    SELECT o.id, pg_catalog.min(o.line) AS first, pg_catalog.max(o.line) AS last,
           pg_catalog.array_agg(o.line ORDER BY o.line) AS lines
      FROM open_lines o
     GROUP BY o.id, CASE WHEN o.started THEN o.place / ((o.total + 7) / 8) ELSE 0 END),
judged AS MATERIALIZED (
    SELECT d.id, d.batch_id, d.queue, d.command, d.priority, d.attempt, d.batch_open, p.first, p.last,
           CASE WHEN d.lines IS NULL OR p.last - p.first + 1 = pg_catalog.cardinality(p.lines) THEN NULL ELSE p.lines END AS lines,
           pg_catalog.cardinality(p.lines) AS size,
           d.crashes + d.started::int AS crashes,
           d.solo_crashes + (d.started AND d.alone)::int AS solo_crashes,
           p.first = p.last AND (d.solo OR (d.started AND d.crashes >= 1)) AS solo,
           p.first = p.last AND d.started AND d.alone AND d.solo_crashes + 1 >= $3::int AS killer
      FROM pieces p
      JOIN dead d ON d.id = p.id),
failed AS (
    INSERT INTO musterd.results (batch_id, line, state, attempt, error)
    SELECT j.batch_id, j.first, 'failed', j.attempt,
           pg_catalog.format('the worker process died %s times while it ran this row and nothing else (liveness.max_crashes)',
                             j.solo_crashes)
      FROM judged j
     WHERE j.killer
        ON CONFLICT DO NOTHING
    RETURNING batch_id, line),
tallied AS (
    -- A token of its own: a tally with the dead worker's would tell a zombie that its flush was applied.
    INSERT INTO musterd.tallies (batch_id, token, failed)
    SELECT f.batch_id, pg_catalog.gen_random_uuid(), pg_catalog.count(*)::int FROM failed f GROUP BY f.batch_id),
freed AS (
    INSERT INTO musterd.blocks (batch_id, first_line, last_line, lines, queue, command, priority, attempt, crashes, solo,
                                solo_crashes, available_at)
    SELECT j.batch_id, j.first, j.last, j.lines, j.queue, j.command, j.priority, j.attempt, j.crashes, j.solo, j.solo_crashes,
           CASE WHEN j.batch_open THEN pg_catalog.now() ELSE 'infinity' END
      FROM judged j
     WHERE NOT j.killer)
SELECT d.batch_id, d.queue,
       COALESCE(pg_catalog.sum(j.size) FILTER (WHERE NOT j.killer), 0)::bigint AS lines,
       pg_catalog.count(*) FILTER (WHERE j.killer) AS failed
  FROM dead d
  LEFT JOIN judged j ON j.id = d.id
 GROUP BY d.id, d.batch_id, d.queue
