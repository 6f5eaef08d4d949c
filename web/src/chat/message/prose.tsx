/** A text of an answer: Markdown once its chunk is loaded, plain until then. */

import { effect, signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Answer } from "../conversation/answer.ts";

type View = typeof import("../markdown/view.ts");

const loaded = signal<View | null>(null);

export function loadMarkdown(): void {
  void import("../markdown/view.ts").then((module) => (loaded.value = module));
}

export function Prose({ answer, place }: { answer: Answer; place: number }) {
  const box = useRef<HTMLDivElement>(null);
  const view = loaded.value;
  useLayoutEffect(() => {
    if (!view) return loadMarkdown();
    if (!box.current) return;
    const drawn = new view.MarkdownView(box.current);
    const off = effect(() => {
      const piece = answer.pieces.value[place];
      drawn.update(piece?.text ?? "", answer.isLive.value && !piece?.isDone);
    });
    return () => {
      off();
      drawn.destroy();
    };
  }, [view, answer, place]);
  if (!view) return <div class="text plain">{answer.pieces.value[place]?.text}</div>;
  return <div key="prose" ref={box} class="text prose" />;
}
