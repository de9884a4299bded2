-- Insert the failures of blocks that are still held and have all the lines that are done.
--
-- By block: $1 ids, $2 tokens, $3 lines that are done. By failure: $4 slot, $5 line, $6 error. By block: $7 how long ago
-- its first row started, $8 the seconds that a row took. By failure: $9 its group, $10 the code that the handler gave, $11 result, $12 outputs.
INSERT INTO musterd.failures (batch_id, line, generation, attempt, error_group, error, error_code, result, outputs, finished_at,
                              started_at, run_seconds)
SELECT b.batch_id, f.line, b.generation, b.attempt, f.error_group, f.error, f.error_code, f.result, f.outputs, pg_catalog.clock_timestamp(),
       pg_catalog.clock_timestamp() - ($7::float8[])[f.slot] * interval '1 second', ($8::float8[])[f.slot]
  FROM ROWS FROM (pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::int[]), pg_catalog.unnest($6::text[]), pg_catalog.unnest($9::int[]),
                  pg_catalog.unnest($10::text[]), pg_catalog.unnest($11::json[]), pg_catalog.unnest($12::json[]))
       AS f (slot, line, error, error_group, error_code, result, outputs)
  JOIN musterd.blocks b ON b.id = ($1::bigint[])[f.slot] AND b.token = ($2::uuid[])[f.slot] AND ($3::int4multirange[])[f.slot] <@ b.lines
 WHERE b.id = ANY ($1)
