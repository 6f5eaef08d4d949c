/** Suggestions fit the model that is served. */

import { expect, test } from "vitest";
import { ideasFor } from "../src/chat/composer/ideas.ts";

test("of this engine the bundled model is asked, others are not, and no model nothing", () => {
  expect(ideasFor("streamer-demo").join()).toContain("PagedAttention");
  expect(ideasFor("fake").join()).toContain("count");
  expect(ideasFor("org/a-model").join()).not.toMatch(/PagedAttention|batching|count/);
  expect(ideasFor("constructor")).toEqual(ideasFor("org/a-model"));
  expect(ideasFor(undefined)).toEqual([]);
});
