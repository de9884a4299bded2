//! What must never happen to the ledger: refused in every test database, or written down for the test that asks.
//!
//! The refusals are what production cannot afford. Their SQLSTATE (XX001, of the exclusion constraints 23P01) is one that blames
//! no row: a worker that meets one keeps everything, and its test fails. A test that breaks the ledger by hand calls
//! [`by_hand`].

use tokio_postgres::Client;

/// In the template, so in every database that was copied from it.
const GUARD: &str = "
CREATE SCHEMA guard;
GRANT USAGE ON SCHEMA guard TO PUBLIC;

-- Chunks, outcomes and failures are written once. Failures are moved to their history by a redrive, and only so. Retention deletes them,
-- of a batch that says that its data is gone.
CREATE FUNCTION guard.is_gone(p_batch bigint) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog AS $$
    SELECT EXISTS (SELECT FROM musterd.batches b WHERE b.id = p_batch AND b.data_gone_at IS NOT NULL)
$$;
CREATE FUNCTION guard.refuse() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    IF TG_OP = 'DELETE' AND guard.is_gone(OLD.batch_id) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'guard: % of %: %', TG_OP, TG_TABLE_NAME, OLD USING ERRCODE = 'data_corrupted';
END $$;
CREATE TRIGGER written_once BEFORE UPDATE OR DELETE ON musterd.chunks FOR EACH ROW EXECUTE FUNCTION guard.refuse();
CREATE TRIGGER written_once BEFORE UPDATE OR DELETE ON musterd.outcomes FOR EACH ROW EXECUTE FUNCTION guard.refuse();
CREATE TRIGGER written_once BEFORE UPDATE ON musterd.failures FOR EACH ROW EXECUTE FUNCTION guard.refuse();
CREATE TRIGGER written_once BEFORE UPDATE OR DELETE ON musterd.failures_history
    FOR EACH ROW EXECUTE FUNCTION guard.refuse();
CREATE FUNCTION guard.was_moved() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF NOT guard.is_gone(OLD.batch_id) AND NOT EXISTS (SELECT FROM musterd.failures_history h JOIN musterd.batches b ON b.id = h.batch_id
                    WHERE h.batch_id = OLD.batch_id AND h.line = OLD.line AND h.generation = OLD.generation
                      AND h.redriven_in = b.generation + 1 AND b.summarized_at IS NOT NULL AND h.error = OLD.error) THEN
        RAISE EXCEPTION 'guard: not moved to the history: %', OLD USING ERRCODE = 'data_corrupted';
    END IF;
    RETURN NULL;
END $$;
-- After the statement: it is one that deletes and inserts.
CREATE TRIGGER moved AFTER DELETE ON musterd.failures FOR EACH ROW EXECUTE FUNCTION guard.was_moved();

-- No two outcomes of a batch share a line, and none a line with a failure.
CREATE FUNCTION guard.span(p_batch bigint, p_lines int4multirange) RETURNS int8multirange
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog AS $$
    SELECT range_agg(int8range((p_batch << 31) + lower(r), (p_batch << 31) + upper(r))) FROM unnest(p_lines) r
$$;
CREATE FUNCTION guard.check_outcome() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF NEW.succeeded <> musterd.count_lines(NEW.lines) THEN
        RAISE EXCEPTION 'guard: an outcome that counts % lines of %', NEW.succeeded, NEW.lines USING ERRCODE = 'data_corrupted';
    ELSIF EXISTS (SELECT FROM musterd.failures f WHERE f.batch_id = NEW.batch_id AND f.line >= lower(NEW.lines)
                     AND f.line < upper(NEW.lines) AND f.line <@ NEW.lines) THEN
        RAISE EXCEPTION 'guard: a line of % has failed', NEW.lines USING ERRCODE = 'data_corrupted';
    END IF;
    NEW.span := guard.span(NEW.batch_id, NEW.lines);
    RETURN NEW;
END $$;
ALTER TABLE musterd.outcomes ADD COLUMN span int8multirange,
    ADD CONSTRAINT no_line_twice EXCLUDE USING gist (span WITH &&);
CREATE TRIGGER checked BEFORE INSERT ON musterd.outcomes FOR EACH ROW EXECUTE FUNCTION guard.check_outcome();
CREATE FUNCTION guard.check_failure() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF EXISTS (SELECT FROM musterd.outcomes o WHERE o.span && guard.span(NEW.batch_id, musterd.line_set(ARRAY[NEW.line]))) THEN
        RAISE EXCEPTION 'guard: line % has succeeded', NEW.line USING ERRCODE = 'data_corrupted';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER checked BEFORE INSERT ON musterd.failures FOR EACH ROW EXECUTE FUNCTION guard.check_failure();

-- A block says how many lines it has, has few ranges, and shares no line with another when its transaction ends.
CREATE FUNCTION guard.check_block() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF NEW.rows <> musterd.count_lines(NEW.lines) THEN
        RAISE EXCEPTION 'guard: a block of % rows has the lines %', NEW.rows, NEW.lines USING ERRCODE = 'data_corrupted';
    ELSIF (SELECT count(*) FROM unnest(NEW.lines)) > 500 THEN
        RAISE EXCEPTION 'guard: a block of too many ranges: %', NEW.lines USING ERRCODE = 'data_corrupted';
    END IF;
    NEW.span := guard.span(NEW.batch_id, NEW.lines);
    RETURN NEW;
END $$;
ALTER TABLE musterd.blocks ADD COLUMN span int8multirange,
    ADD CONSTRAINT no_line_in_two_blocks EXCLUDE USING gist (span WITH &&) DEFERRABLE INITIALLY DEFERRED;
CREATE TRIGGER checked BEFORE INSERT OR UPDATE OF lines, rows, batch_id ON musterd.blocks
    FOR EACH ROW EXECUTE FUNCTION guard.check_block();

-- No task is in two claims that may both write its outcome.
CREATE FUNCTION guard.check_claim() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF EXISTS (SELECT FROM musterd.task_claims k WHERE k.token <> NEW.token AND k.number = NEW.number AND k.tasks && NEW.tasks
                  AND EXISTS (SELECT FROM musterd.task_ids(k.tasks * NEW.tasks) i (id) JOIN musterd.task_records t
                                  ON t.id = i.id AND t.state = 'queued' AND t.ticket = NEW.number)) THEN
        RAISE EXCEPTION 'guard: tasks of % are claimed already', NEW.tasks USING ERRCODE = 'data_corrupted';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER checked BEFORE INSERT ON musterd.task_claims FOR EACH ROW EXECUTE FUNCTION guard.check_claim();

-- For tests that need a task that runs and no worker: what a claim of it writes.
CREATE FUNCTION guard.claim(p_id bigint, p_token uuid DEFAULT gen_random_uuid(), p_worker text DEFAULT 'w', p_at timestamptz DEFAULT now())
RETURNS uuid LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    UPDATE musterd.task_records t
       SET ticket = t.ticket + 1, claimed_at = CASE WHEN t.dedup_key IS NULL THEN t.claimed_at ELSE p_at END
     WHERE t.id = p_id AND t.state = 'queued';
    INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes, claimed_at)
    SELECT p_token, p_worker, t.queue, t.command, musterd.id_set(ARRAY[t.id]), t.ticket, 1, t.crashes, p_at
      FROM musterd.task_records t WHERE t.id = p_id AND t.state = 'queued';
    RETURN p_token;
END $$;

-- For tests that need an outcome and no worker: what the flush of one row writes.
CREATE FUNCTION guard.result(p_batch bigint, p_line int, p_state text, p_attempt int DEFAULT 1, p_result jsonb DEFAULT NULL,
                             p_error text DEFAULT 'no', p_outputs jsonb DEFAULT NULL, p_at timestamptz DEFAULT now())
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
    v_ok   int := (p_state = 'succeeded')::int;
    v_this int := (SELECT b.generation FROM musterd.batches b WHERE b.id = p_batch);
BEGIN
    INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, results, outputs,
                                  finished_at)
    VALUES (p_batch, p_line * v_ok, gen_random_uuid(), 1, v_this, p_attempt,
            CASE v_ok WHEN 1 THEN musterd.line_set(ARRAY[p_line]) ELSE '{}' END, v_ok, 1 - v_ok, p_result::text, p_outputs::text, p_at);
    INSERT INTO musterd.failures (batch_id, line, generation, attempt, error_group, error, finished_at)
    SELECT p_batch, p_line, v_this, p_attempt, hashtext(regexp_replace(p_error, '[0-9]+', '', 'g')), p_error, p_at WHERE v_ok = 0;
END $$;";

const TRIGGERS: &str = "
CREATE TABLE public.violations (what text NOT NULL);
CREATE FUNCTION public.never() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.violations VALUES (format('%s of %s: %s', TG_OP, TG_TABLE_NAME, OLD));
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$;
-- An ended batch changes only into its next generation, and its task with it.
CREATE FUNCTION public.never_but_reopened() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF EXISTS (SELECT FROM musterd.batches b WHERE b.id = OLD.id AND b.generation > 1 AND b.summarized_at IS NULL)
       AND NEW.state = 'running' THEN
        RETURN NEW;
    END IF;
    INSERT INTO public.violations VALUES (format('%s of %s: %s', TG_OP, TG_TABLE_NAME, OLD));
    RETURN NEW;
END $$;
CREATE TRIGGER ended BEFORE UPDATE ON musterd.task_records
    FOR EACH ROW WHEN (OLD.state IN ('succeeded', 'failed', 'aborted')) EXECUTE FUNCTION public.never_but_reopened();
CREATE TRIGGER gone BEFORE DELETE ON musterd.task_records
    FOR EACH ROW WHEN (OLD.state IN ('succeeded', 'failed', 'aborted')) EXECUTE FUNCTION public.never();
CREATE TRIGGER ended BEFORE UPDATE ON musterd.batches
    FOR EACH ROW WHEN (OLD.summarized_at IS NOT NULL
                       AND NOT (NEW.generation = OLD.generation + 1 AND NEW.summarized_at IS NULL AND NEW.rows = OLD.rows))
    EXECUTE FUNCTION public.never();
CREATE TRIGGER gone BEFORE DELETE ON musterd.batches
    FOR EACH ROW WHEN (OLD.summarized_at IS NOT NULL) EXECUTE FUNCTION public.never();";

/// From now on what must not happen to the ledger is refused. Has no effect where it is already.
pub(crate) async fn guard(client: &Client) {
    let there = "SELECT to_regnamespace('guard') IS NOT NULL";
    if !client.query_one(there, &[]).await.unwrap().get::<_, bool>(0) {
        client.batch_execute(GUARD).await.unwrap();
    }
}

/// From now on every change of an ended task or batch is written down.
pub(crate) async fn install(client: &Client) {
    client.batch_execute(TRIGGERS).await.unwrap();
}

/// What was written down.
pub(crate) async fn violations(client: &Client) -> Vec<String> {
    let rows = client.query("SELECT what FROM public.violations LIMIT 10", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Does to the ledger what the guard refuses: without triggers, and without the exclusion constraints.
pub(crate) async fn by_hand(client: &Client, sql: &str) {
    let allowed = "SET LOCAL session_replication_role = replica;
         ALTER TABLE musterd.outcomes DROP CONSTRAINT IF EXISTS no_line_twice;
         ALTER TABLE musterd.blocks DROP CONSTRAINT IF EXISTS no_line_in_two_blocks";
    client.batch_execute(&format!("BEGIN; {allowed}; {sql}; COMMIT")).await.unwrap();
}
