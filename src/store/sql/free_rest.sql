-- Of blocks that close, the lines that are not done become free blocks: those to be tried again, and the rest. Their queues are woken, also
-- for what is due later: an idle worker sleeps until the next due time it knows of, and the worker that closes may be busy or about to end.
--
-- By block that closes: $1 ids, $2 tokens, $3 lines that are done, $4 lines to be tried again, $5 seconds until they are due,
-- $6 seconds until the rest is due, $7 an error for people to see while the retries wait, $8 why the rest was not started. A retry
-- is a further attempt, and its process lived: it is no suspect any more. The rest is computed here from what is open, so no list
-- of a worker can lose a line or double one; it is dropped only if the database says that the batch is being aborted.
WITH freed AS (
    INSERT INTO musterd.blocks (batch_id, lines, rows, generation, queue, command, priority, attempt, crashes, solo, solo_crashes, error,
                                available_at)
    SELECT b.batch_id, a.lines, (SELECT pg_catalog.sum(pg_catalog.upper(r) - pg_catalog.lower(r)) FROM pg_catalog.unnest(a.lines) r),
           b.generation, b.queue, b.command, b.priority, b.attempt + a.retry::int,
           CASE WHEN a.retry THEN 0 ELSE b.crashes END, b.solo AND NOT a.retry, CASE WHEN a.retry THEN 0 ELSE b.solo_crashes END,
           CASE WHEN a.retry THEN c.error ELSE c.rest_error END,
           -- No wait is longer than a year, whatever a service asked for: the calendar has an end.
           pg_catalog.now() + pg_catalog.make_interval(secs => LEAST(CASE WHEN a.retry THEN c.retry_wait ELSE c.rest_wait END, 31622400))
      FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[]), pg_catalog.unnest($3::int4multirange[]),
                      pg_catalog.unnest($4::int4multirange[]), pg_catalog.unnest($5::float8[]), pg_catalog.unnest($6::float8[]),
                      pg_catalog.unnest($7::text[]), pg_catalog.unnest($8::text[]))
               AS c (id, token, done, retry, retry_wait, rest_wait, error, rest_error)
      JOIN musterd.blocks b ON b.id = c.id AND b.token = c.token AND c.done <@ b.lines
      JOIN musterd.batches x ON x.id = b.batch_id AND NOT x.aborting
     CROSS JOIN LATERAL (VALUES (true, c.retry * (b.lines - c.done)), (false, b.lines - c.done - c.retry)) a (retry, lines)
     WHERE b.id = ANY ($1) AND NOT pg_catalog.isempty(a.lines)
    RETURNING queue)
SELECT pg_catalog.pg_notify('musterd_wake', f.queue) FROM (SELECT DISTINCT queue FROM freed) f
