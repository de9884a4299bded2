-- What people look at: the derived state of a row, and the progress of a batch.
--
-- Rule of this file: states of rows are derived, never stored; progress is a sum of tallies, never a count over rows.

CREATE VIEW musterd.batch_rows AS
SELECT i.batch_id,
       i.line,
       i.input,
       CASE
           WHEN r.line IS NOT NULL THEN r.state
           WHEN b.summarized_at IS NOT NULL THEN 'aborted'
           WHEN k.owned THEN 'running'
           ELSE 'queued'
       END AS state,
       COALESCE(r.attempt, k.attempt) AS attempt,
       r.result,
       r.error,
       r.outputs,
       r.finished_at
  FROM musterd.rows i
  JOIN musterd.batches b ON b.id = i.batch_id
  LEFT JOIN musterd.results r ON r.batch_id = i.batch_id AND r.line = i.line
  LEFT JOIN LATERAL (
      SELECT k.worker IS NOT NULL AS owned, k.attempt
        FROM musterd.blocks k
       WHERE r.line IS NULL  -- finished lines need no look at the blocks
         AND k.batch_id = i.batch_id
         AND i.line BETWEEN k.first_line AND k.last_line
         AND (k.lines IS NULL OR i.line = ANY (k.lines))
       ORDER BY k.worker IS NULL
       LIMIT 1) k ON true;
COMMENT ON VIEW musterd.batch_rows IS
    'Every row with its state: the result''s; else aborted if the batch has ended; else running if an owned block covers it; '
    'else queued. attempt is the one that ended, is running or comes next; null for a line no block has covered yet.';

CREATE VIEW musterd.batch_progress AS
SELECT b.id,
       CASE
           WHEN t.state = 'running' AND b.next_line = 1 AND b.generation = 1 AND NOT b.aborting THEN 'queued'
           ELSE t.state
       END AS state,
       b.rows,
       GREATEST(b.rows - d.succeeded - d.failed - h.running - e.aborted, 0) AS queued,
       h.running,
       d.succeeded,
       d.failed,
       e.aborted,
       b.aborting,
       b.generation,
       b.queue,
       b.command,
       b.priority,
       t.parent_id,
       t.created_at,
       t.finished_at,
       b.outputs
  FROM musterd.batches b
  JOIN musterd.tasks t ON t.id = b.id
 CROSS JOIN LATERAL (
      SELECT COALESCE(b.succeeded, sum(y.succeeded), 0)::int AS succeeded,
             COALESCE(b.failed, sum(y.failed), 0)::int AS failed
        FROM musterd.tallies y
       -- BETWEEN, not =, is for the planner: it then expects few of them and goes through the index. With = and few
       -- batches it reads the tallies of all, for each of them.
       WHERE y.batch_id BETWEEN b.id AND b.id AND b.summarized_at IS NULL) d
 CROSS JOIN LATERAL (
      -- A block counts for what it covers less what was tallied under its token; lines that an earlier holder finished
      -- are counted once by the bound.
      SELECT LEAST(COALESCE(sum(GREATEST(
                 COALESCE(cardinality(k.lines), k.last_line - k.first_line + 1)
                 - (SELECT COALESCE(sum(y.succeeded + y.failed), 0)
                      FROM musterd.tallies y WHERE y.batch_id = b.id AND y.token = k.token), 0)), 0),
                 b.rows - d.succeeded - d.failed)::int AS running
        FROM musterd.blocks k
       WHERE k.batch_id = b.id AND k.worker IS NOT NULL AND b.summarized_at IS NULL) h
 CROSS JOIN LATERAL (SELECT COALESCE(b.aborted, 0) AS aborted) e;
COMMENT ON VIEW musterd.batch_progress IS
    'One line per batch: state and counts. While it runs the counts come from tallies and blocks, after its end from the '
    'summary. queued is what is left; state is queued as long as no line was ever carved.';
