-- Append the rows that the lines of blocks still held ask for; the batches and the blocks were locked by the statements before.
--
-- $1 block ids, $2 tokens (the slot of a block is its place here, from 1); then, by appended row: $3 slot, $4 the line that asks
-- for it, $5 its place among those, $6 input. A line that has a result has had its say: whoever writes it again appends nothing.
SELECT musterd.append_rows(g.batch_id, pg_catalog.array_agg(g.input ORDER BY g.line, g.place))
  FROM (SELECT b.batch_id, a.line, a.place, a.input
          FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) WITH ORDINALITY AS h (id, token, slot)
          JOIN musterd.blocks b ON b.id = h.id AND b.token = h.token
          JOIN ROWS FROM (pg_catalog.unnest($3::int[]), pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::int[]),
                          pg_catalog.unnest($6::jsonb[])) AS a (slot, line, place, input) ON a.slot = h.slot
         WHERE NOT EXISTS (SELECT FROM musterd.results r WHERE r.batch_id = b.batch_id AND r.line = a.line)) g
 GROUP BY g.batch_id
 ORDER BY g.batch_id
