// npm's `ollama` against the daemon at $HOST_URL.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Ollama } from "ollama";

const headers = { Authorization: `Bearer ${process.env.API_KEY}` };
const client = new Ollama({ host: process.env.HOST_URL, headers });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Say hello." }];
const options = { temperature: 0, num_predict: 8, num_ctx: 4096 };

test("what there is", async () => {
  const { models } = await client.list();
  assert.ok(models.some((one) => one.model === model));
  assert.ok((await client.show({ model })).capabilities.includes("completion"));
  assert.ok((await client.ps()).models.some((one) => one.model === model));
});

test("a chat and its lines say the same", async () => {
  await client.chat({ model, messages, options }); // from here on all but the last token of the prompt is known
  const whole = await client.chat({ model, messages, options, keep_alive: "5m" });
  let text = "";
  let last;
  for await (const part of await client.chat({ model, messages, options, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.ok(text.length > 0);
  assert.equal(text, whole.message.content);
  assert.equal(last.done_reason, whole.done_reason);
  assert.equal(last.eval_count, whole.eval_count);
});

test("JSON by a schema", async () => {
  const properties = { ok: { type: "boolean" } };
  const format = { type: "object", properties, required: ["ok"], additionalProperties: false };
  const { message } = await client.chat({ model, messages, format, options: { ...options, num_predict: 60 } });
  assert.equal(typeof JSON.parse(message.content).ok, "boolean");
});

test("text and vectors", async () => {
  assert.ok((await client.generate({ model, prompt: "Say hello.", options })).response.length > 0);
  const { embeddings } = await client.embed({ model: process.env.EMBEDDER, input: ["a lamp", "a garden"] });
  assert.equal(embeddings.length, 2);
});

test("a stream that is aborted, and errors", async () => {
  const stream = await client.generate({ model, prompt: "Count.", stream: true, options: { num_predict: 500 } });
  await assert.rejects(async () => {
    for await (const _ of stream) stream.abort();
  }, { name: "AbortError" });
  await assert.rejects(client.chat({ model: "llama9", messages }), (error) => {
    assert.equal(error.status_code, 404);
    assert.match(error.message, /llama9/);
    return true;
  });
});
