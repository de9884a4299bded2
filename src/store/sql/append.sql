-- Append the rows that lines of blocks ask for, if the blocks are still held and have all the lines that are done; the batches
-- and the blocks were locked by the statements before. A batch that is being aborted takes no more rows; what its rows did is
-- recorded all the same.
--
-- By block: $1 ids, $2 tokens, $3 lines that are done. By appended row, in the order of their lines: $4 slot, $5 input.
SELECT musterd.append_texts(g.batch_id, pg_catalog.array_agg(g.input ORDER BY g.place))
  FROM (SELECT b.batch_id, a.place, a.input
          FROM ROWS FROM (pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::text[])) WITH ORDINALITY AS a (slot, input, place)
          JOIN musterd.blocks b ON b.id = ($1::bigint[])[a.slot] AND b.token = ($2::uuid[])[a.slot]
                               AND ($3::int4multirange[])[a.slot] <@ b.lines
          JOIN musterd.batches x ON x.id = b.batch_id AND NOT x.aborting
         WHERE b.id = ANY ($1)) g
 GROUP BY g.batch_id
 ORDER BY g.batch_id
