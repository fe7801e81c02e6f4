// npm's `openai` against the daemon at $BASE_URL, whose model is $MODEL and whose embedding model $EMBEDDER.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Switch on the light in the hall, please." }];
const light = {
  name: "set_light",
  description: "Switch a light.",
  parameters: {
    type: "object",
    properties: { room: { enum: ["kitchen", "hall"] }, on: { type: "boolean" } },
    required: ["room", "on"],
    additionalProperties: false,
  },
};
const tools = [{ type: "function", function: light }];
const tool_choice = { type: "function", function: { name: "set_light" } };

test("models", async () => {
  const ids = [];
  for await (const one of client.models.list()) ids.push(one.id);
  assert.ok(ids.includes(model), ids.join());
});

test("a chat and a stream say the same", async () => {
  const asked = { model, messages, max_tokens: 12, temperature: 0 };
  await client.chat.completions.create(asked); // from here on all but the last token of the prompt is known
  const whole = await client.chat.completions.create(asked);
  let text = "";
  let usage, reason, first;
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    first ??= chunk;
    usage = chunk.usage ?? usage;
    text += chunk.choices[0]?.delta.content ?? "";
    reason = chunk.choices[0]?.finish_reason ?? reason;
  }
  assert.deepEqual(first.choices[0].delta, { role: "assistant", content: null });
  assert.ok(text.length > 0);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(reason, whole.choices[0].finish_reason);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  assert.equal(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens - 1);
});

test("a stream put together by the package, with a call", async () => {
  const stream = client.chat.completions.stream({ model, messages, tools, tool_choice, max_tokens: 80, seed: 1 });
  const { choices: [choice] } = await stream.finalChatCompletion();
  assert.equal(choice.finish_reason, "tool_calls");
  const [call] = choice.message.tool_calls;
  assert.equal(call.function.name, "set_light");
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["room", "on"]);
});

test("the package's own loop of calls and results", async () => {
  const seen = [];
  const runnable = { type: "function", function: { ...light, parse: JSON.parse, function: (given) => seen.push(given) } };
  const runner = client.chat.completions.runTools({ model, messages, tools: [runnable], tool_choice, max_tokens: 80, seed: 1 });
  await runner.done();
  assert.equal(seen.length, 1);
  assert.ok(["kitchen", "hall"].includes(seen[0].room));
});

test("JSON by a schema", async () => {
  const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
  const reply = await client.chat.completions.parse({
    model, messages, max_tokens: 40,
    response_format: { type: "json_schema", json_schema: { name: "verdict", schema, strict: true } },
  });
  assert.equal(typeof JSON.parse(reply.choices[0].message.content).ok, "boolean");
});

test("responses, whole and streamed", async () => {
  const asked = { model, input: "Say hello.", max_output_tokens: 8, temperature: 0 };
  await client.responses.create(asked);
  const whole = await client.responses.create(asked);
  const kinds = [];
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(kinds[0], "response.created");
  assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);
  assert.equal(text, whole.output_text);
});

test("embeddings, which the package asks for in base64", async () => {
  const { data } = await client.embeddings.create({ model: process.env.EMBEDDER, input: ["a lamp", "a garden"] });
  assert.equal(data.length, 2);
  assert.ok(Math.abs(data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);
});

test("a client that leaves is no trouble, and errors are the package's own", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 500, stream: true });
  for await (const _ of stream) {
    stream.controller.abort();
  }
  await assert.rejects(client.chat.completions.create({ model: "gpt-9", messages }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.match(error.message, /gpt-9/);
    assert.equal(error.code, "model_not_found");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  const stranger = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(stranger.chat.completions.create({ model, messages }), OpenAI.AuthenticationError);
  assert.ok((await client.chat.completions.create({ model, messages, max_tokens: 1 })).choices.length);
});
