//! Triggers that write down whatever must never happen to the ledger.

use tokio_postgres::Client;

const TRIGGERS: &str = "
CREATE TABLE public.violations (what text NOT NULL);
CREATE FUNCTION public.never() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.violations VALUES (format('%s of %s: %s', TG_OP, TG_TABLE_NAME, OLD));
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE TRIGGER written_once BEFORE UPDATE OR DELETE ON musterd.rows
    FOR EACH ROW EXECUTE FUNCTION public.never();
CREATE TRIGGER written_once BEFORE UPDATE ON musterd.results FOR EACH ROW EXECUTE FUNCTION public.never();
CREATE FUNCTION public.never_but_to_the_history() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM musterd.results_history h JOIN musterd.batches b ON b.id = h.batch_id
                    WHERE h.batch_id = OLD.batch_id AND h.line = OLD.line AND h.generation = b.generation
                      AND b.summarized_at IS NOT NULL AND OLD.state = 'failed' AND h.error IS NOT DISTINCT FROM OLD.error) THEN
        INSERT INTO public.violations VALUES (format('%s of %s: %s', TG_OP, TG_TABLE_NAME, OLD));
    END IF;
    RETURN OLD;
END $$;
CREATE TRIGGER moved BEFORE DELETE ON musterd.results
    FOR EACH ROW EXECUTE FUNCTION public.never_but_to_the_history();
CREATE TRIGGER written_once BEFORE UPDATE OR DELETE ON musterd.results_history
    FOR EACH ROW EXECUTE FUNCTION public.never();
CREATE TRIGGER only_added BEFORE UPDATE OR DELETE ON musterd.tallies
    FOR EACH ROW EXECUTE FUNCTION public.never();
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
CREATE TRIGGER ended BEFORE UPDATE ON musterd.tasks
    FOR EACH ROW WHEN (OLD.state IN ('succeeded', 'failed', 'aborted')) EXECUTE FUNCTION public.never_but_reopened();
CREATE TRIGGER gone BEFORE DELETE ON musterd.tasks
    FOR EACH ROW WHEN (OLD.state IN ('succeeded', 'failed', 'aborted')) EXECUTE FUNCTION public.never();
CREATE TRIGGER ended BEFORE UPDATE ON musterd.batches
    FOR EACH ROW WHEN (OLD.summarized_at IS NOT NULL
                       AND NOT (NEW.generation = OLD.generation + 1 AND NEW.summarized_at IS NULL AND NEW.rows = OLD.rows))
    EXECUTE FUNCTION public.never();
CREATE TRIGGER gone BEFORE DELETE ON musterd.batches
    FOR EACH ROW WHEN (OLD.summarized_at IS NOT NULL) EXECUTE FUNCTION public.never();";

/// From now on everything that must not happen is written down.
pub(crate) async fn install(client: &Client) {
    client.batch_execute(TRIGGERS).await.unwrap();
}

/// What was written down.
pub(crate) async fn violations(client: &Client) -> Vec<String> {
    let rows = client.query("SELECT what FROM public.violations LIMIT 10", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}
