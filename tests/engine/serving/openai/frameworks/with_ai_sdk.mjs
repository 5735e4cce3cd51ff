// The AI SDK over its openai-compatible provider: texts, streams, tools, objects, embeddings and errors.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, token] = process.argv.slice(2);
const settings = { name: "weftline", baseURL: `${url}/v1`, apiKey: token, includeUsage: true };
const provider = createOpenAICompatible({ ...settings, supportsStructuredOutputs: true });
const prompt = "The photo shows: 2 red circles.\nQuestion: How many red circles are there?";
const answer = "There are 2 red circles.";
const asked = { maxRetries: 0 };

const whole = await generateText({ ...asked, model: provider("chat"), temperature: 0, prompt });
assert.equal(whole.text, answer);
assert.equal(whole.finishReason, "stop");
assert.ok(whole.usage.inputTokens > 10 && whole.usage.outputTokens > 2);

const streamed = streamText({ ...asked, model: provider("chat"), temperature: 0, prompt });
const pieces = [];
for await (const piece of streamed.textStream) pieces.push(piece);
assert.equal(pieces.join(""), answer);
assert.ok(pieces.length > 2);
assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);

const text = { ...asked, temperature: 0, maxOutputTokens: 5, prompt };
const completed = await generateText({ ...text, model: provider.completionModel("complete") });
assert.equal(await streamText({ ...text, model: provider.completionModel("complete") }).text, completed.text);

const weather = tool({
  description: "The weather of a day.",
  inputSchema: z.object({ rain: z.boolean() }),
  execute: async ({ rain }) => ({ forecast: rain ? "rain" : "sun" }),
});
const tools = { weather };
const forced = { ...asked, model: provider("calls"), tools, seed: 3 };
const called = await generateText({ ...forced, toolChoice: "required", prompt });
assert.equal(called.finishReason, "tool-calls");
assert.equal(typeof called.toolCalls[0].input.rain, "boolean");
assert.ok(called.toolResults[0].output.forecast);
const named = await generateText({ ...forced, toolChoice: { type: "tool", toolName: "weather" }, prompt });
assert.equal(named.toolCalls[0].toolName, "weather");

const stream = streamText({ ...forced, toolChoice: "required", prompt });
assert.equal(typeof (await stream.toolCalls)[0].input.rain, "boolean");
assert.equal(await stream.finishReason, "tool-calls");

// Two steps: the call and its result go back as history.
const steps = await generateText({
  ...forced, prompt, stopWhen: stepCountIs(2), maxOutputTokens: 150,
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});
assert.equal(steps.steps.length, 2);
assert.ok(steps.steps[1].usage.inputTokens > whole.usage.inputTokens && !steps.steps[1].toolCalls.length);

const schema = z.object({ rain: z.boolean(), wind: z.boolean() });
for (const output of [Output.object({ schema }), Output.object({ schema: jsonSchema(z.toJSONSchema(schema)) })]) {
  const typed = await generateText({ ...asked, model: provider("calls"), output, prompt });
  assert.equal(typeof typed.output.wind, "boolean");
  const partial = streamText({ ...asked, model: provider("calls"), output, prompt });
  assert.equal(typeof (await partial.output).rain, "boolean");
}

const { embeddings, usage } = await embedMany({ ...asked, model: provider.embeddingModel("embed"), values: ["one", "two"] });
assert.equal(embeddings.length, 2);
assert.ok(usage.tokens > 0);

const refusal = async (model, text) => {
  try {
    await generateText({ ...asked, model: provider(model), prompt: text });
  } catch (error) {
    assert.ok(APICallError.isInstance(error), error);
    return error;
  }
  assert.fail("no error");
};
assert.equal((await refusal("nope", prompt)).statusCode, 404);
const overflow = await refusal("chat", "the user asks and the assistant answers ".repeat(400));
assert.equal(overflow.statusCode, 400);
assert.equal(overflow.data.error.code, "context_length_exceeded");
assert.match(overflow.message, /maximum context length/);
