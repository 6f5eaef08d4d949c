// ollama for JS: a tool loop, whole and streamed, a schema, what is served.
import assert from "node:assert/strict";
import { client as bundled } from "./bundled.mjs";
import { client } from "./configuration.mjs";

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const about = { name: "get_weather", description: "The weather of a city.", parameters };
const tools = [{ type: "function", function: about }];
const messages = [{ role: "user", content: "How is the weather?" }];
const whole = await client.chat({ model: "fake", messages, tools, think: true });
assert.equal(whole.message.thinking, "I look.");
const calls = [];
for await (const part of await client.chat({ model: "fake", messages, tools, stream: true })) {
  calls.push(...(part.message.tool_calls ?? []));
}
assert.deepEqual(calls[0].function, { name: "get_weather", arguments: { city: "Bern" } });
messages.push(whole.message, { role: "tool", tool_name: "get_weather", content: "18 degrees in Bern" });
const last = await client.chat({ model: "fake", messages, tools });
assert.equal(last.message.content, "It is 18 degrees in Bern.");
const format = {
  type: "object", properties: { is_sure: { type: "boolean" } }, required: ["is_sure"],
  additionalProperties: false,
};
const question = [{ role: "user", content: "Which color?" }];
const typed = await bundled.chat({ model: "streamer-demo", messages: question, format });
assert.equal(typeof JSON.parse(typed.message.content).is_sure, "boolean");
assert.deepEqual((await client.show({ model: "fake" })).capabilities, ["completion", "tools", "thinking"]);
assert.equal((await client.list()).models[0].name, "fake");
console.log("a tool loop, whole and streamed, an answer of a schema, what is served");
