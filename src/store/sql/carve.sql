-- Carve the next lines off the cursors of open batches: one block for every token, one cursor update for every batch.
--
-- $1 queue, $2 worker, $3 tokens, $4 commands, $5 the most lines of a block by command, $6 the fewest worth a block by
-- command, $7 fibers of the queue, $8 the scope a structured queue works on (null: any), $9 commands of tasks that go before rows
-- of a worse priority (null: none do), $10 commands whose claims are to be durable.
--
-- The batches are those of the best priority, in turn; the tokens go round them, so that all advance by the same number of
-- blocks. A block has at most its share of what remains, so that the end of a batch is not one long block. Large blocks end
-- where chunks usually end (every 500 lines), so that a block reads one chunk and not two halves.
WITH s AS MATERIALIZED (
    -- Losing a claim in a crash of the server only repeats work, which the fence then refuses.
    SELECT pg_catalog.set_config('synchronous_commit', 'off', true),
           pg_catalog.set_config('lock_timeout', '100ms', true)
     -- A worker that was declared dead and does not know it yet claims nothing.
     WHERE NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = $2 AND w.state = 'dead')),
best AS MATERIALIZED (
    SELECT b.id, b.uid, b.generation, b.next_line, b.rows, b.command, b.priority, b.turn
      FROM musterd.batches b, s
     WHERE b.queue = $1 AND b.open AND b.next_line <= b.rows AND NOT b.canary_only AND b.command = ANY ($4::text[])
       AND NOT EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = $1)
       AND ($8::bigint IS NULL OR b.id = $8
            OR EXISTS (SELECT FROM musterd.task_records p WHERE p.id = b.id AND p.parent_id = $8))
       AND ($9::text[] IS NULL OR b.priority <= COALESCE((
            SELECT pg_catalog.min(h.priority) FROM pg_catalog.unnest($9) c (command)
             CROSS JOIN LATERAL (SELECT t.priority FROM musterd.task_tickets t
                                  WHERE t.queue = $1 AND t.command = c.command AND t.ready AND t.crashes = 0
                                    AND ($8::bigint IS NULL OR t.parent_id = $8)
                                  ORDER BY t.priority LIMIT 1) h), 2147483647))
       /*limit*/
     ORDER BY /*order*/ b.turn
     LIMIT 8
       FOR NO KEY UPDATE OF b /*skip*/),
share AS (
    SELECT z.id, z.uid, z.next_line, z.i, z.m, z.size, z.blocks,
           CASE WHEN z.size >= 500 THEN (z.next_line - 1) % 500 ELSE 0 END AS shift
      FROM (SELECT o.id, o.uid, o.next_line, o.i, o.m,
                   GREATEST(1, LEAST(w.most, GREATEST(w.least, pg_catalog.ceil((o.rows - o.next_line + 1) / (2.0 * $7::float8))::int))) AS size,
                   (pg_catalog.cardinality($3::uuid[]) - o.i + o.m - 1) / o.m AS blocks
              FROM (SELECT b.*, (pg_catalog.row_number() OVER (ORDER BY b.turn))::int - 1 AS i, (pg_catalog.count(*) OVER ())::int AS m
                      FROM best b
                     -- The best one; where priority does not count, that of the batch that has waited longest.
                     WHERE b.priority = (SELECT b.priority FROM best b ORDER BY /*order*/ b.turn LIMIT 1)) o
              JOIN ROWS FROM (pg_catalog.unnest($4::text[]), pg_catalog.unnest($5::int[]), pg_catalog.unnest($6::int[]))
                   AS w (command, most, least) ON w.command = o.command) z),
carved AS (
    UPDATE musterd.batches x
       SET next_line = LEAST(share.next_line + share.size::bigint * share.blocks - share.shift, x.rows + 1)::int,
           turn = pg_catalog.nextval('musterd.turns')
      FROM share
     -- Once more as an array: whatever the size of the table when this was planned, it is looked up and not walked through.
     WHERE x.id = share.id AND x.id = ANY (ARRAY (SELECT b.id FROM best b)) AND share.blocks > 0
    RETURNING x.id, x.uid, x.generation, share.next_line AS first, x.next_line AS stop, share.i, share.m, share.size, share.shift,
              x.queue, x.command, x.priority),
made AS (
    INSERT INTO musterd.blocks (batch_id, lines, rows, generation, queue, command, priority, worker, token, claimed_at)
    SELECT c.id, pg_catalog.int4multirange(pg_catalog.int4range(t.first, t.stop)), t.stop - t.first, c.generation, c.queue, c.command, c.priority, $2,
           t.token, pg_catalog.now()
      FROM carved c
     CROSS JOIN LATERAL (
           -- The first block ends at the boundary, the others follow it.
           SELECT g.token, CASE g.n WHEN 0 THEN c.first ELSE LEAST(c.first + g.n * c.size - c.shift, c.stop)::int END AS first,
                  LEAST(c.first + (g.n + 1) * c.size - c.shift, c.stop)::int AS stop
             FROM (SELECT u.token, (u.j - 1) / c.m AS n
                     FROM pg_catalog.unnest($3::uuid[]) WITH ORDINALITY u (token, j)
                    WHERE (u.j - 1) % c.m = c.i) g) t
     WHERE t.first < t.stop
    RETURNING id, token, batch_id, lines, generation, command, attempt, solo, crashes)
SELECT m.id, m.token, m.batch_id, c.uid, m.lines, m.generation, m.command, m.attempt, m.solo, m.crashes,
       -- Of a batch its first line says how long it waited; the others wait for their turn.
       CASE WHEN pg_catalog.lower(m.lines) = 1 THEN EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - (
            SELECT t.run_at FROM musterd.task_records t WHERE t.id = m.batch_id))::float8 END AS waited,
       -- A function that crashes the server must not take its own claim with it, and run for ever.
       CASE WHEN m.command = ANY ($10::text[]) THEN pg_catalog.set_config('synchronous_commit', 'on', true) END
  FROM made m
  JOIN carved c ON c.id = m.batch_id
 ORDER BY m.id
