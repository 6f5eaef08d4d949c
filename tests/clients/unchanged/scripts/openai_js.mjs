// openai for JS: the tool runner, parse helpers with zod, a response with a call, forced calls.
import assert from "node:assert/strict";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { client as bundled } from "./bundled.mjs";
import { client } from "./configuration.mjs";

const Reply = z.object({ color: z.enum(["red", "blue"]), is_sure: z.boolean() });
const color = [{ role: "user", content: "Which color?" }];
const weather = [{ role: "user", content: "How is the weather?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const about = { name: "get_weather", description: "The weather of a city.", parameters };

const chat = await bundled.chat.completions.parse({
  model: "streamer-demo", messages: color, response_format: zodResponseFormat(Reply, "reply"),
});
Reply.parse(chat.choices[0].message.parsed);
const response = await bundled.responses.parse({
  model: "streamer-demo", input: "Which color?", text: { format: zodTextFormat(Reply, "reply") },
});
Reply.parse(response.output_parsed);

const tool = {
  type: "function",
  function: { ...about, parse: JSON.parse, function: ({ city }) => `18 degrees in ${city}` },
};
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model: "fake", messages: weather, tools: [tool], stream });
  assert.equal(await runner.finalContent(), "It is 18 degrees in Bern.");
}
const events = client.responses.stream({
  model: "fake", input: weather, tools: [{ type: "function", strict: false, ...about }],
});
const kinds = new Set();
for await (const event of events) kinds.add(event.type);
assert(kinds.has("response.function_call_arguments.done"), [...kinds].join());
const final = await events.finalResponse();
const call = final.output.find((item) => item.type === "function_call");
const last = await client.responses.create({
  model: "fake", previous_response_id: final.id,
  input: [{ type: "function_call_output", call_id: call.call_id, output: "18 degrees in Bern" }],
});
assert.equal(last.output_text, "It is 18 degrees in Bern.");
const pick = zodFunction({ name: "pick", parameters: Reply });
for (const tool_choice of ["required", { type: "function", function: { name: "pick" } }]) {
  const forced = await bundled.chat.completions.parse({
    model: "streamer-demo", messages: color, tools: [pick], tool_choice, parallel_tool_calls: false,
  });
  Reply.parse(forced.choices[0].message.tool_calls[0].function.parsed_arguments);
}
console.log("\nparse helpers, the tool runner whole and streamed, a response with a call, forced calls");
