// Orders, the mail about each, and a batch of charges, in the application's own transaction (node-postgres).
//
// usage: node producer.js DATABASE_URL [fail]
const { Client } = require('pg');

async function placeOrders(client, orders, thenFail) {
  await client.query('BEGIN');
  try {
    for (const order of orders) {
      await client.query('INSERT INTO orders (id, customer) VALUES ($1, $2)', [order.id, order.customer]);
      await client.query("SELECT musterd.enqueue('send_mail', $1, idempotency_key => $2)", [
        { to: order.customer },
        `order-${order.id}-mail`,
      ]);
    }
    // node-postgres makes a PostgreSQL array of a JavaScript one: a JSON array is handed over as text.
    const answer = await client.query("SELECT musterd.submit_batch('charge', $1::jsonb, on_done => 'report') AS batch", [
      JSON.stringify(orders),
    ]);
    if (thenFail) throw new Error('the application changed its mind');
    await client.query('COMMIT');
    return answer.rows[0].batch;
  } catch (error) {
    await client.query('ROLLBACK');
    throw error;
  }
}

async function main([url, fail]) {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    const orders = [
      { id: 1, customer: 'ada@example.org' },
      { id: 2, customer: 'bob@example.org' },
    ];
    console.log(await placeOrders(client, orders, fail === 'fail'));
  } finally {
    await client.end();
  }
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
