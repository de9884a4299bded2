// An http handler: a block of rows is one POST, answered in one reply. See ../protocol.md.
//
//     [handlers.greet]
//     kind = "http"
//     url = "http://127.0.0.1:8080/greet"
//     secret = "whsec_…"          # checked here when MUSTER_SECRET is set
//
// Run it with: PORT=8080 MUSTER_SECRET=whsec_… node docs/handlers/http_node.mjs

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const secret = process.env.MUSTER_SECRET;
const key = secret && Buffer.from(secret.replace(/^whsec_/, ""), "base64");

/** Whether the request was signed by who has the key, and not long ago (Standard Webhooks). */
function isSigned(headers, body) {
  if (!key) return true;
  const { "webhook-id": id, "webhook-timestamp": time, "webhook-signature": signatures = "" } = headers;
  if (Math.abs(Date.now() / 1000 - Number(time)) > 300) return false;
  const expected = createHmac("sha256", key).update(`${id}.${time}.${body}`).digest();
  return signatures.split(" ").some((signature) => {
    const given = Buffer.from(signature.replace(/^v1,/, ""), "base64");
    return given.length === expected.length && timingSafeEqual(given, expected);
  });
}

/** The work: one outcome for every row. Use row.idempotency_key to do things once: a row may come again. */
function handle(row, context) {
  const { line, input } = row;
  if (!input.name) return { line, outcome: "failed", error: "a row needs a name" };
  return { line, outcome: "succeeded", result: { greeting: `${context.word ?? "Hello"}, ${input.name}!` } };
}

const server = createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const body = Buffer.concat(chunks).toString();
  if (!isSigned(request.headers, body)) return response.writeHead(401).end("not signed");
  const { batch, rows } = JSON.parse(body);
  const reply = { rows: rows.map((row) => handle(row, batch.context)) };
  response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(reply));
});

server.listen(Number(process.env.PORT ?? 8080), "127.0.0.1", () => {
  console.log(`listening on ${server.address().port}`);
});
