/** An answer's text: Markdown once its chunk is loaded, plain until then. */

import { effect, signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Answer } from "../conversation/answer.ts";

type View = typeof import("../markdown/view.ts");

const loaded = signal<View | null>(null);

export function loadMarkdown(): void {
  void import("../markdown/view.ts").then((module) => (loaded.value = module));
}

export function Prose({ answer }: { answer: Answer }) {
  const box = useRef<HTMLDivElement>(null);
  const view = loaded.value;
  useLayoutEffect(() => {
    if (!view) return loadMarkdown();
    if (!box.current) return;
    const drawn = new view.MarkdownView(box.current);
    const off = effect(() => drawn.update(answer.text.value, answer.isLive.value));
    return () => {
      off();
      drawn.destroy();
    };
  }, [view, answer]);
  if (!view) return <div class="text plain">{answer.text}</div>;
  return <div key="prose" ref={box} class="text prose" />;
}
