"use strict";
// What the page says and offers: examples, labels of the modes, hints of the policies.

const OMAR =
  "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. Omar sells 26 " +
  "pencils at the market. How many pencils does Omar have now?";
const BUS =
  "A bus starts with 12 people. At the first stop 9 people get on. At the second stop 5 of " +
  "them go. How many people are on the bus now?";
const BOOK =
  "A book has 96 pages. Mia reads 9 pages a day for 8 days. How many pages are left?";
const QUESTIONS = [
  { title: "Pencils", text: OMAR },
  { title: "Bus", text: BUS },
  { title: "Book", text: BOOK },
  { title: "What can you do?", text: "What can you do?" },
];
const EXAMPLES = {
  ask: QUESTIONS,
  chat: QUESTIONS,
  gaps: [
    {
      title: "Pencils",
      text:
        "With the pencils from Anna, Omar has [MASK:1] + 48 = [MASK:1,2,3] pencils.\n" +
        "Now Omar has 55 - [MASK:2] = [MASK:2] pencils left.",
      question: OMAR,
    },
    {
      title: "Book",
      text: "In 8 days Mia reads [MASK:5] pages.\nThen there are [MASK:2] - 72 = 24 pages left.",
      question: BOOK,
    },
  ],
};
const OF_MODES = {
  ask: { label: "Question", hint: "Enter runs it, Shift+Enter starts a line." },
  chat: { label: "Message", hint: "Enter sends it, Shift+Enter starts a line." },
  gaps: {
    label: "Text with gaps",
    hint: "[MASK:2] is a gap of two tokens, [MASK:1,2,3] the best of three lengths, [MASK:auto] any.",
  },
};
const POLICIES = {
  threshold: "Takes every position that is certain enough.",
  factor: "Takes more positions at once the more certain they are.",
  low_confidence: "Takes a fixed number a forward, the most certain first.",
  entropy: "Prefers positions whose distribution is narrow.",
  topk_margin: "Prefers positions whose best token is far ahead of the second.",
  random: "Takes a fixed number a forward, wherever they are.",
  sequential: "Goes from left to right.",
  joint_threshold: "Takes what is certain, and may replace it later.",
  origin: "Takes each position with the same probability.",
};
