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
CREATE TRIGGER written_once BEFORE UPDATE OR DELETE ON musterd.results
    FOR EACH ROW EXECUTE FUNCTION public.never();
CREATE TRIGGER only_added BEFORE UPDATE OR DELETE ON musterd.tallies
    FOR EACH ROW EXECUTE FUNCTION public.never();
CREATE TRIGGER ended BEFORE UPDATE OR DELETE ON musterd.tasks
    FOR EACH ROW WHEN (OLD.state IN ('succeeded', 'failed', 'aborted')) EXECUTE FUNCTION public.never();
CREATE TRIGGER ended BEFORE UPDATE OR DELETE ON musterd.batches
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
