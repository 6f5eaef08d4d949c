/** A modal dialog with a name; the browser keeps the focus in it, and Escape closes it. */

import type { Signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useId, useLayoutEffect, useRef } from "preact/hooks";

interface Props {
  title: string;
  open: Signal<boolean>;
  children: ComponentChildren;
  onClose?: () => void;
}

export function Dialog({ title, open, children, onClose }: Props) {
  const box = useRef<HTMLDialogElement>(null);
  const id = useId();
  const isOpen = open.value;
  useLayoutEffect(() => {
    if (isOpen && !box.current?.open) box.current?.showModal();
    if (!isOpen && box.current?.open) box.current.close();
  }, [isOpen]);
  const closed = () => {
    open.value = false;
    onClose?.();
  };
  return (
    <dialog ref={box} class="dialog" aria-labelledby={id} onClose={closed}>
      <h2 id={id}>{title}</h2>
      {children}
    </dialog>
  );
}
