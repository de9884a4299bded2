//! Uploads that come too late: they remove what is theirs alone, and nothing that an end of the batch refers to.

use musterd::store::batches::Completion;

use super::ground::*;
use super::{agrees, behind_a_proxy, stalled};
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::Fault;
use crate::suite::support::wait::within;

/// FINDINGS 15: the generation that the late one uploads has ended with these very files, and the next one runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_upload_leaves_the_files_of_an_ended_generation_alone() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = over(&client, 3, "a").await;
    // A failed row, so that there is something to drive again.
    client.query_one("SELECT musterd.append_rows($1, ARRAY['4']::jsonb[])", &[&id]).await.unwrap();
    let fail = format!("UPDATE musterd.batches SET next_line = 5; SELECT guard.result({id}, 4, 'failed')");
    client.batch_execute(&fail).await.unwrap();
    let (direct, held, proxy) = behind_a_proxy().await;
    proxy.set(Fault::Blackhole);
    let (slow, fast) = (completer(&db, &held), completer(&db, &direct));
    let late = slow.complete_with_outputs(id, false);
    let overtaking = async {
        stalled(&client).await;
        assert_eq!(fast.complete_with_outputs(id, true).await.unwrap(), Completion::Completed);
        let outputs = agrees(&client, &fast.uploader.objects, id).await;
        let again: String =
            client.query_one("SELECT state FROM musterd.redrive($1)", &[&id]).await.unwrap().get(0);
        assert_eq!(again, "running");
        proxy.set(Fault::None);
        outputs
    };
    let (answer, outputs) = within(PATIENCE, async { tokio::join!(late, overtaking) }).await;
    assert_eq!(answer.unwrap(), Completion::Open, "the next generation runs");
    // The first generation has been told of: its files are what it was told they are.
    assert_eq!(agrees(&client, &fast.uploader.objects, id).await, outputs);
    assert!(outputs["manifest"].as_str().unwrap().contains("/g1-r4/"), "{outputs}");
    // The second one has files of its own.
    let run = "SELECT guard.result(b.id, 4, 'succeeded', p_outputs => '{\"out.txt\": \"4:a\\n\"}') FROM musterd.batches b;
               DELETE FROM musterd.blocks";
    client.batch_execute(run).await.unwrap();
    assert_eq!(fast.complete_with_outputs(id, true).await.unwrap(), Completion::Completed);
    let second = agrees(&client, &fast.uploader.objects, id).await;
    assert!(second["manifest"].as_str().unwrap().contains("/g2-r4/"), "{second}");
    let first = musterd::objects::Key::new(outputs["manifest"].as_str().unwrap()).unwrap();
    assert!(fast.uploader.objects.read(&first).await.is_ok(), "and the first one's are still there");
}
