-- Insert the outcomes of the blocks that are still held, and one tally for each of them, counted from what was inserted.
--
-- $1 block ids, $2 tokens (the slot of a block is its place here, from 1); then, by row: $3 slot, $4 line, $5 attempt,
-- $6 succeeded, $7 result, $8 error, $9 outputs. The blocks were locked by the statement before, so `held` cannot change.
WITH held AS MATERIALIZED (
    SELECT h.slot::int AS slot, b.batch_id, b.token
      FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) WITH ORDINALITY AS h (id, token, slot)
      JOIN musterd.blocks b ON b.id = h.id AND b.token = h.token),
stored AS (
    INSERT INTO musterd.results (batch_id, line, state, attempt, result, error, outputs)
    SELECT h.batch_id, r.line, CASE WHEN r.ok THEN 'succeeded'::musterd.state ELSE 'failed' END, r.attempt, r.result, r.error,
           r.outputs
      FROM ROWS FROM (pg_catalog.unnest($3::int[]), pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::int[]),
                      pg_catalog.unnest($6::bool[]), pg_catalog.unnest($7::jsonb[]), pg_catalog.unnest($8::text[]),
                      pg_catalog.unnest($9::jsonb[])) AS r (slot, line, attempt, ok, result, error, outputs)
      JOIN held h ON h.slot = r.slot
        ON CONFLICT DO NOTHING
    RETURNING batch_id, line, state)
INSERT INTO musterd.tallies (batch_id, token, succeeded, failed)
SELECT h.batch_id, h.token,
       pg_catalog.count(s.line) FILTER (WHERE s.state = 'succeeded'), pg_catalog.count(s.line) FILTER (WHERE s.state = 'failed')
  FROM held h
  LEFT JOIN ROWS FROM (pg_catalog.unnest($3::int[]), pg_catalog.unnest($4::int[])) AS g (slot, line) ON g.slot = h.slot
  LEFT JOIN stored s ON s.batch_id = h.batch_id AND s.line = g.line
 GROUP BY h.batch_id, h.token
RETURNING token, succeeded, failed
