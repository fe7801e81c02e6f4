// npm's `@ai-sdk/openai-compatible`, which checks every chunk against its schemas, against the daemon at $BASE_URL.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const provider = createOpenAICompatible({
  name: "homeprefixd",
  baseURL: process.env.BASE_URL,
  apiKey: process.env.API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(process.env.MODEL);
const prompt = [{ role: "user", content: [{ type: "text", text: "Switch on the light in the hall, please." }] }];
const tools = [
  {
    type: "function",
    name: "set_light",
    description: "Switch a light.",
    inputSchema: {
      type: "object",
      properties: { room: { enum: ["kitchen", "hall"] }, on: { type: "boolean" } },
      required: ["room", "on"],
      additionalProperties: false,
    },
  },
];

async function parts(options) {
  const { stream } = await model.doStream({ prompt, ...options });
  const found = [];
  for await (const part of stream) {
    assert.notEqual(part.type, "error", JSON.stringify(part));
    found.push(part);
  }
  return found;
}

test("text, whole and streamed", async () => {
  const options = { maxOutputTokens: 12, temperature: 0 };
  await model.doGenerate({ prompt, ...options }); // from here on all but the last token of the prompt is known
  const whole = await model.doGenerate({ prompt, ...options });
  const streamed = await parts(options);
  const text = streamed.filter((part) => part.type === "text-delta").map((part) => part.delta).join("");
  assert.ok(text.length > 0);
  assert.equal(text, whole.content[0].text);
  const finish = streamed.find((part) => part.type === "finish");
  assert.equal(finish.finishReason.unified, whole.finishReason.unified);
  assert.equal(finish.usage.outputTokens.total, whole.usage.outputTokens.total);
  assert.equal(finish.usage.inputTokens.cacheRead, finish.usage.inputTokens.total - 1);
});

test("a call, whole and streamed, and its result", async () => {
  const options = { tools, toolChoice: { type: "required" }, maxOutputTokens: 80, seed: 1 };
  const whole = await model.doGenerate({ prompt, ...options });
  assert.equal(whole.finishReason.unified, "tool-calls");
  const streamed = await parts(options);
  for (const call of [whole.content, streamed].map((list) => list.find((part) => part.type === "tool-call"))) {
    assert.equal(call.toolName, "set_light");
    assert.deepEqual(Object.keys(JSON.parse(call.input)), ["room", "on"]);
  }
  const { toolCallId, toolName, input } = streamed.find((part) => part.type === "tool-call");
  const after = await model.doGenerate({
    prompt: [
      ...prompt,
      { role: "assistant", content: [{ type: "tool-call", toolCallId, toolName, input: JSON.parse(input) }] },
      { role: "tool", content: [{ type: "tool-result", toolCallId, toolName, output: { type: "text", value: "done" } }] },
    ],
    tools,
    maxOutputTokens: 2,
  });
  assert.ok(after.usage.inputTokens.cacheRead > 20);
});

test("JSON by a schema", async () => {
  const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
  const streamed = await parts({ responseFormat: { type: "json", schema }, maxOutputTokens: 40 });
  const text = streamed.filter((part) => part.type === "text-delta").map((part) => part.delta).join("");
  assert.equal(typeof JSON.parse(text).ok, "boolean");
});

test("text completions and embeddings", async () => {
  const completed = await provider.completionModel(process.env.MODEL).doGenerate({ prompt, maxOutputTokens: 4 });
  assert.ok(completed.content[0].text.length > 0);
  const embedder = (provider.embeddingModel ?? provider.textEmbeddingModel)(process.env.EMBEDDER);
  const { embeddings, usage } = await embedder.doEmbed({ values: ["a lamp", "a garden"] });
  assert.equal(embeddings.length, 2);
  assert.ok(usage.tokens > 0);
});

test("errors carry our message", async () => {
  await assert.rejects(provider("gpt-9").doGenerate({ prompt }), (error) => {
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /gpt-9/);
    return true;
  });
});
