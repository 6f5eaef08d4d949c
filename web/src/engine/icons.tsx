/** The icons of the playback's buttons. */

export const Pause = () => (
  <svg class="icon" viewBox="0 0 20 20" aria-hidden="true" fill="currentColor">
    <rect x="5" y="4.5" width="3.4" height="11" rx="1" />
    <rect x="11.6" y="4.5" width="3.4" height="11" rx="1" />
  </svg>
);

export const Play = () => (
  <svg class="icon" viewBox="0 0 20 20" aria-hidden="true" fill="currentColor">
    <path d="M6.5 4.6v10.8a.8.8 0 0 0 1.2.7l8.6-5.4a.8.8 0 0 0 0-1.4L7.7 3.9a.8.8 0 0 0-1.2.7z" />
  </svg>
);
