-- Insert the outcomes of blocks that are still held and have all the lines that are done: one tuple for each block and stripe.
--
-- By block (its slot is its place, from 1): $1 ids, $2 tokens, $3 lines that are done, $4 parts. By outcome: $5 slot, $6 lines that
-- succeeded, $7 how many, $8 how many failed, $9 results, $10 outputs.
-- By block: $11 how long ago its first row started, $12 the seconds that a row took. The blocks were locked by the statement before.
--
-- No ON CONFLICT: a part that was used for other lines must be an error; DO NOTHING would lose them.
INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, results, outputs,
                              finished_at, started_at, run_seconds)
SELECT b.batch_id, COALESCE(pg_catalog.lower(s.lines), 0), b.token, ($4::int[])[s.slot], b.generation, b.attempt, s.lines, s.succeeded,
       s.failed, s.results, s.outputs, pg_catalog.clock_timestamp(),
       pg_catalog.clock_timestamp() - ($11::float8[])[s.slot] * interval '1 second', ($12::float8[])[s.slot]
  FROM ROWS FROM (pg_catalog.unnest($5::int[]), pg_catalog.unnest($6::int4multirange[]), pg_catalog.unnest($7::int[]),
                  pg_catalog.unnest($8::int[]), pg_catalog.unnest($9::text[]), pg_catalog.unnest($10::text[]))
       AS s (slot, lines, succeeded, failed, results, outputs)
  JOIN musterd.blocks b ON b.id = ($1::bigint[])[s.slot] AND b.token = ($2::uuid[])[s.slot] AND ($3::int4multirange[])[s.slot] <@ b.lines
 WHERE b.id = ANY ($1)
