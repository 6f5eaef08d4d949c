// Vercel's AI SDK: generateText and streamText with tools, objects, required calls, by both providers.
import assert from "node:assert/strict";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as bundled from "./bundled.mjs";
import { model, responses } from "./configuration.mjs";

const schema = z.object({ color: z.enum(["red", "blue"]), is_sure: z.boolean() });
const tools = {
  get_weather: tool({
    description: "The weather of a city.", strict: false,
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `18 degrees in ${city}`,
  }),
};
for (const [name, each, real] of [
  ["openai-compatible", model, bundled.model],
  ["openai", responses, bundled.responses],
]) {
  const asked = { model: each, tools, prompt: "How is the weather?", stopWhen: stepCountIs(4) };
  const whole = await generateText(asked);
  assert.equal(whole.text, "It is 18 degrees in Bern.");
  assert.equal(whole.steps.length, 2);
  assert.equal(whole.steps[0].reasoningText ?? "I look.", "I look.");
  const streamed = streamText(asked);
  const kinds = new Set();
  let text = "";
  for await (const part of streamed.fullStream) {
    kinds.add(part.type);
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text ?? part.delta;
  }
  assert.equal(text, "It is 18 degrees in Bern.");
  for (const kind of ["tool-input-delta", "tool-call", "tool-result"]) assert(kinds.has(kind), kind);
  const { object } = await generateObject({ model: real, schema, prompt: "Which color?" });
  schema.parse(object);
  const pick = tool({ inputSchema: schema });
  for (const toolChoice of ["required", { type: "tool", toolName: "pick" }]) {
    const forced = await generateText({ model: real, tools: { pick }, toolChoice, prompt: "Which color?" });
    schema.parse(forced.toolCalls[0].input);
  }
  console.log("ok", name, object);
}
console.log("text with tools, whole and streamed, objects, required calls, by both providers");
