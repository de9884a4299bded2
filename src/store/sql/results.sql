-- Insert the outcomes of the blocks that are still held, and one tally for each of them, counted from what was inserted.
--
-- $1 block ids, $2 tokens (the slot of a block is its place here, from 1); then, by row: $3 slot, $4 line, $5 attempt,
-- $6 succeeded, $7 result, $8 error, $9 outputs. The blocks were locked by the statement before, so `held` cannot change.
--
-- What was inserted is matched with its slot by grouping, not by joining: the planner takes an array for ten elements
-- and a join of 500 with 500 became a nested loop, 25 times as expensive as the insert itself.
WITH held AS MATERIALIZED (
    SELECT h.slot::int AS slot, b.batch_id, b.token
      FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) WITH ORDINALITY AS h (id, token, slot)
      JOIN musterd.blocks b ON b.id = h.id AND b.token = h.token),
given AS MATERIALIZED (
    SELECT h.slot, h.batch_id, r.line, r.attempt, r.ok, r.result, r.error, r.outputs
      FROM ROWS FROM (pg_catalog.unnest($3::int[]), pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::int[]),
                      pg_catalog.unnest($6::bool[]), pg_catalog.unnest($7::jsonb[]), pg_catalog.unnest($8::text[]),
                      pg_catalog.unnest($9::jsonb[])) AS r (slot, line, attempt, ok, result, error, outputs)
      JOIN held h ON h.slot = r.slot),
stored AS (
    INSERT INTO musterd.results (batch_id, line, state, attempt, result, error, outputs)
    SELECT g.batch_id, g.line, CASE WHEN g.ok THEN 'succeeded'::musterd.state ELSE 'failed' END, g.attempt, g.result, g.error,
           g.outputs
      FROM given g
        ON CONFLICT DO NOTHING
    RETURNING batch_id, line, state, outputs IS NOT NULL AS outputs),
matched AS (
    SELECT pg_catalog.max(u.slot) AS slot, pg_catalog.max(u.state) AS state, pg_catalog.bool_or(u.outputs) AS outputs
      FROM (SELECT g.batch_id, g.line, g.slot, NULL::musterd.state AS state, NULL::bool AS outputs FROM given g
            UNION ALL
            SELECT s.batch_id, s.line, NULL, s.state, s.outputs FROM stored s) u
     GROUP BY u.batch_id, u.line),
counted AS (
    SELECT m.slot, pg_catalog.count(*) FILTER (WHERE m.state = 'succeeded') AS succeeded,
           pg_catalog.count(*) FILTER (WHERE m.state = 'failed') AS failed, pg_catalog.bool_or(m.outputs) AS outputs
      FROM matched m
     GROUP BY m.slot)
INSERT INTO musterd.tallies (batch_id, token, succeeded, failed, outputs)
SELECT h.batch_id, h.token, COALESCE(c.succeeded, 0), COALESCE(c.failed, 0), COALESCE(c.outputs, false)
  FROM held h
  LEFT JOIN counted c ON c.slot = h.slot
RETURNING token, succeeded, failed
