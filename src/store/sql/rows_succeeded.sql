-- Rows that succeeded, from a line on, as sets. $1 batch, $2 first line, $3 the most rows.
--
-- Outcomes that lie across the first line begin in its stripe of 10,000 lines. Of those that begin behind it the $3 next are
-- enough, because each has a line of its own; and of these only the first stripes that have $3 rows together.
(SELECT 'succeeded' AS state, o.first_line AS outcome, o.lines, o.attempt, NULL::text AS error, o.finished_at, o.started_at, o.run_seconds
   FROM musterd.outcomes o
  WHERE o.batch_id = $1 AND o.first_line > 0 AND o.first_line > ($2::int - 1) / 10000 * 10000 AND o.first_line <= $2
    AND pg_catalog.upper(o.lines) > $2)
UNION ALL
SELECT 'succeeded', s.first_line, s.lines, s.attempt, NULL, s.finished_at, s.started_at, s.run_seconds
  FROM (SELECT n.first_line, n.lines, n.attempt, n.finished_at, n.started_at, n.run_seconds,
               pg_catalog.sum(n.succeeded) OVER (ORDER BY (n.first_line - 1) / 10000
                                                 GROUPS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM (SELECT o.first_line, o.lines, o.succeeded, o.attempt, o.finished_at, o.started_at, o.run_seconds
                  FROM musterd.outcomes o
                 WHERE o.batch_id = $1 AND o.first_line > 0 AND o.first_line > $2
                 ORDER BY o.first_line LIMIT $3::bigint) n) s
 WHERE COALESCE(s.before, 0) < $3
