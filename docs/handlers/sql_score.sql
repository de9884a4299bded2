-- A sql handler over blocks: scores rows in the database, without a row leaving it. See ../handlers.md.
--
--     [handlers.score]
--     kind = "sql"
--     function = "app.score"
--
-- Called with up to block_size rows at a time. What it writes, the outcomes it returns and the progress of the batch commit
-- together, if the worker still holds the block: exactly once, whatever dies.

CREATE SCHEMA IF NOT EXISTS app;

CREATE TABLE IF NOT EXISTS app.scores (
    batch    bigint NOT NULL,
    line     int NOT NULL,
    customer text NOT NULL,
    score    numeric NOT NULL,
    PRIMARY KEY (batch, line)
);

CREATE OR REPLACE FUNCTION app.score(batch bigint, context jsonb, rows jsonb)
RETURNS TABLE (line int, outcome text, result jsonb, error text)
LANGUAGE sql AS $$
    WITH given AS MATERIALIZED (
        SELECT r.line, r.input ->> 'customer' AS customer, (r.input ->> 'spent')::numeric AS spent
          FROM jsonb_to_recordset(rows) AS r (line int, input jsonb)),
    scored AS (
        INSERT INTO app.scores AS s (batch, line, customer, score)
        SELECT batch, g.line, g.customer, round(ln(1 + g.spent) * COALESCE((context ->> 'weight')::numeric, 1), 3)
          FROM given g
         WHERE g.customer IS NOT NULL AND g.spent >= 0
        RETURNING s.line, s.score)
    SELECT g.line,
           CASE WHEN s.line IS NULL THEN 'failed' ELSE 'succeeded' END,
           CASE WHEN s.line IS NULL THEN NULL ELSE jsonb_build_object('score', s.score) END,
           CASE WHEN s.line IS NULL THEN 'a row needs a customer, and what they spent' END
      FROM given g
      LEFT JOIN scored s ON s.line = g.line;
$$;
