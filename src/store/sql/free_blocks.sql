-- Free blocks whose holders are dead; the caller has locked them in the statement before.
--
-- $1 block ids, $2 tokens, $3 max_crashes, $4 tokens of blocks that are said to have been running, $5 the group of the error of a line that is failed. Answers with one row per block: batch, queue, lines freed, lines failed.
--
-- What had started is suspect: its open lines come back in eighths, so that the line that kills is soon alone. A single
-- line with two deaths behind it is to run with nothing beside it, and only deaths in such an attempt count against it. What is said to
-- have been running is taken up before the rest: a worker holds one suspect at a time.
WITH dead AS MATERIALIZED (
    SELECT b.id, b.batch_id, b.lines, b.generation, b.queue, b.command, b.priority, b.attempt, b.crashes, b.solo, b.solo_crashes,
           b.alone_at IS NOT NULL AS alone,
           -- A zombie may claim after its end was declared; what it claimed then has harmed no process.
           NOT COALESCE(b.claimed_at > w.ended_at, false) AS started,
           COALESCE(x.aborting, true) AS dropped, b.token = ANY ($4::uuid[]) AS ran
      FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) AS g (id, token)
      JOIN musterd.blocks b ON b.id = g.id AND b.token = g.token
      LEFT JOIN musterd.workers w ON w.id = b.worker
      LEFT JOIN musterd.batches x ON x.id = b.batch_id),
gone AS (
    DELETE FROM musterd.blocks b USING dead d WHERE b.id = d.id),
pieces AS (
    SELECT o.id, pg_catalog.range_agg(pg_catalog.int4range(o.line, o.line + 1)) AS lines, pg_catalog.count(*)::int AS size
      FROM (SELECT d.id, l.line,
                   CASE WHEN d.started THEN pg_catalog.ntile(8) OVER (PARTITION BY d.id ORDER BY l.line) ELSE 1 END AS piece
              FROM dead d
             CROSS JOIN LATERAL (
                   SELECT pg_catalog.generate_series(pg_catalog.lower(r), pg_catalog.upper(r) - 1) AS line
                     FROM pg_catalog.unnest(d.lines) r) l
             WHERE NOT d.dropped) o
     GROUP BY o.id, o.piece),
judged AS MATERIALIZED (
    SELECT d.id, d.batch_id, d.generation, d.queue, d.command, d.priority, d.attempt, p.lines, p.size, d.ran,
           d.crashes + d.started::int AS crashes,
           d.solo_crashes + (d.started AND d.alone)::int AS solo_crashes,
           p.size = 1 AND (d.solo OR (d.started AND d.crashes >= 1)) AS solo,
           p.size = 1 AND d.started AND d.alone AND d.solo_crashes + 1 >= $3::int AS fatal
      FROM pieces p
      JOIN dead d ON d.id = p.id),
failed AS (
    INSERT INTO musterd.failures (batch_id, line, generation, attempt, error_group, error)
    SELECT j.batch_id, pg_catalog.lower(j.lines), j.generation, j.attempt, $5,
           pg_catalog.format('the worker process died %s times while it ran this row and nothing else (liveness.max_crashes)',
                             j.solo_crashes)
      FROM judged j
     WHERE j.fatal),
counted AS (
    -- A token of its own: an outcome with the dead worker's would make a zombie believe that its flush was applied.
    INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed)
    SELECT j.batch_id, 0, pg_catalog.gen_random_uuid(), 1, j.generation, j.attempt, '{}', 0, 1 FROM judged j WHERE j.fatal),
freed AS (
    INSERT INTO musterd.blocks (batch_id, lines, rows, generation, queue, command, priority, attempt, crashes, solo, solo_crashes, available_at)
    SELECT j.batch_id, j.lines, j.size, j.generation, j.queue, j.command, j.priority, j.attempt, j.crashes, j.solo, j.solo_crashes,
           pg_catalog.now() - CASE WHEN j.ran THEN INTERVAL '1 millisecond' ELSE INTERVAL '0' END
      FROM judged j
     WHERE NOT j.fatal
     ORDER BY j.id, pg_catalog.lower(j.lines))
SELECT d.batch_id, d.queue,
       COALESCE(pg_catalog.sum(j.size) FILTER (WHERE NOT j.fatal), 0)::bigint AS lines,
       pg_catalog.count(*) FILTER (WHERE j.fatal) AS failed
  FROM dead d
  LEFT JOIN judged j ON j.id = d.id
 GROUP BY d.id, d.batch_id, d.queue
