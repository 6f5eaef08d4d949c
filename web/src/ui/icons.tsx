/** Our own icons: 20 by 20, one stroke, the colour of the text around them. */

import type { ComponentChildren } from "preact";

function icon(paths: ComponentChildren) {
  return () => (
    <svg class="icon" viewBox="0 0 20 20" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round">
      {paths}
    </svg>
  );
}

export const Plus = icon(<path d="M10 4v12M4 10h12" />);
export const Menu = icon(<path d="M3.5 6h13M3.5 10h13M3.5 14h13" />);
export const Close = icon(<path d="M5 5l10 10M15 5L5 15" />);
export const Chat = icon(<path d="M4 4.5h12a1.5 1.5 0 0 1 1.5 1.5v7a1.5 1.5 0 0 1-1.5 1.5H9.5L6 17.5v-3H4A1.5 1.5 0 0 1 2.5 13V6A1.5 1.5 0 0 1 4 4.5z" />);
export const Engine = icon(<path d="M3 3h5v5H3zM12 3h5v5h-5zM3 12h5v5H3zM12 12h5v5h-5z" />);
export const Sun = icon(
  <>
    <circle cx="10" cy="10" r="3.4" />
    <path d="M10 2v1.6M10 16.4V18M2 10h1.6M16.4 10H18M4.3 4.3l1.2 1.2M14.5 14.5l1.2 1.2M15.7 4.3l-1.2 1.2M5.5 14.5l-1.2 1.2" />
  </>,
);
export const Moon = icon(<path d="M16.5 11.8A7 7 0 0 1 8.2 3.5a7 7 0 1 0 8.3 8.3z" />);
export const Sliders = icon(
  <>
    <path d="M3 6h7M14 6h3M3 14h3M10 14h7" />
    <circle cx="12" cy="6" r="2" />
    <circle cx="8" cy="14" r="2" />
  </>,
);
export const ArrowUp = icon(<path d="M10 16V4.5M4.8 9.5L10 4.3l5.2 5.2" />);
export const Stop = icon(<rect x="5.5" y="5.5" width="9" height="9" rx="1.6" fill="currentColor" stroke="none" />);
export const Key = icon(
  <>
    <circle cx="6.8" cy="13.2" r="3.3" />
    <path d="M9.2 10.8L16.5 3.5M13.2 6.8l2.4 2.4" />
  </>,
);
export const Copy = icon(<path d="M7.5 7.5h9v9h-9zM4.5 12.5h-1v-9h9v1" />);
export const Check = icon(<path d="M4 10.5l4 4 8-9" />);
export const Again = icon(<path d="M16 10a6 6 0 1 1-1.8-4.3L16 7.5M16 3.5v4h-4" />);
export const Pencil = icon(<path d="M4 16l.8-3.4L13.5 4a1.8 1.8 0 0 1 2.5 2.5L7.4 15.2zM12 5.5L14.5 8" />);
export const Left = icon(<path d="M12 5l-5 5 5 5" />);
export const Onward = icon(<path d="M4 5l5 5-5 5M11 5l5 5-5 5" />);
export const Down = icon(<path d="M10 4v11.5M4.8 10.5L10 15.7l5.2-5.2" />);
export const Right = icon(<path d="M8 5l5 5-5 5" />);
export const Dots = icon(<path d="M4.5 10h.01M10 10h.01M15.5 10h.01" stroke-width="2.6" />);
export const Download = icon(<path d="M10 3.5v9M6 9l4 4 4-4M4 16.5h12" />);
export const Upload = icon(<path d="M10 13V4M6 7.5l4-4 4 4M4 16.5h12" />);
export const Search = icon(
  <>
    <circle cx="9" cy="9" r="5" />
    <path d="M12.8 12.8L17 17" />
  </>,
);
export const Columns = icon(<path d="M3.5 4h5.5v12H3.5zM11 4h5.5v12H11z" />);
export const Tokens = icon(<path d="M3 6h4v8H3zM9 6h3v8H9zM14 6h3v8h-3z" />);
export const Keyboard = icon(<path d="M2.5 5.5h15v9h-15zM5.5 8.5h.01M8.5 8.5h.01M11.5 8.5h.01M14.5 8.5h.01M7 11.5h6" />);

export const Wrench = icon(<path d="M12.2 4.2a3.8 3.8 0 0 1 4.4-.6l-2.5 2.5.3 1.5 1.5.3 2.5-2.5a3.8 3.8 0 0 1-5.2 4.4l-6.6 6.6a1.6 1.6 0 0 1-2.3-2.3l6.6-6.6a3.8 3.8 0 0 1 1.3-3.3z" transform="translate(-1.2 .6)" />);

/** The logo: three lines of text, the last still being written. */
export function Mark() {
  return (
    <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="9" fill="var(--accent-deep)" />
      <path d="M8 11h16M8 16h11M8 21h6" stroke="#fff" stroke-width="2.6" stroke-linecap="round" />
    </svg>
  );
}
