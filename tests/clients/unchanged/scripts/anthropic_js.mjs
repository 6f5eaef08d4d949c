// @anthropic-ai/sdk: the stream helper, the tool runner whole and streamed, a count, forced calls.
import assert from "node:assert/strict";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { client as bundled } from "./bundled.mjs";
import { client } from "./configuration.mjs";

const Reply = z.object({ color: z.enum(["red", "blue"]), is_sure: z.boolean() });
const parsed = await bundled.messages.parse({
  model: "streamer-demo", max_tokens: 200, messages: [{ role: "user", content: "Which color?" }],
  output_config: { format: zodOutputFormat(Reply) },
});
Reply.parse(parsed.parsed_output);
const asked = { model: "fake", messages: [{ role: "user", content: "How is the weather?" }] };
const tool = betaZodTool({
  name: "get_weather", description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }), run: ({ city }) => `18 degrees in ${city}`,
});
const { run, parse, ...plain } = tool;
const stream = client.messages.stream({ ...asked, max_tokens: 999, tools: [plain] });
const message = await stream.finalMessage();
assert.deepEqual(message.content.map((block) => block.type), ["thinking", "tool_use"]);
assert.deepEqual(message.content[1].input, { city: "Bern" });
const last = await client.beta.messages.toolRunner({ ...asked, max_tokens: 999, tools: [tool] });
assert.equal(last.content[0].text, "It is 18 degrees in Bern.");
const streamed = client.beta.messages.toolRunner({ ...asked, max_tokens: 999, tools: [tool], stream: true });
let text = "";
for await (const each of streamed) text = (await each.finalMessage()).content.at(-1).text;
assert.equal(text, "It is 18 degrees in Bern.");
assert((await client.messages.countTokens({ ...asked, tools: [plain] })).input_tokens > 100);
const pick = { name: "pick", input_schema: {
  type: "object", properties: { color: { enum: ["red", "blue"] } }, required: ["color"],
} };
for (const choice of [{ type: "any" }, { type: "tool", name: "pick" }]) {
  const forced = await bundled.messages.create({
    model: "streamer-demo", max_tokens: 200, messages: [{ role: "user", content: "Which color?" }],
    tools: [pick], tool_choice: { ...choice, disable_parallel_tool_use: true },
  });
  assert.deepEqual(forced.content.map((block) => block.type), ["tool_use"]);
  assert(["red", "blue"].includes(forced.content[0].input.color));
}
console.log("parse and stream helpers, the tool runner whole and streamed, a count, forced calls");
