// Images for the next message: dropped, pasted or picked, shown as previews until they are sent.

import { byId, h, icon, iconButton } from "./dom.js";

const READ_BY_SERVERS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_BYTES = 24 << 20;

const asUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

// Return a data URL of an image; formats that only browsers read become PNG.
async function read(file) {
  if (READ_BY_SERVERS.includes(file.type)) return asUrl(file);
  const bitmap = await createImageBitmap(file);
  const canvas = h("canvas", { width: bitmap.width, height: bitmap.height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return canvas.toDataURL("image/png");
}

export const pictures = (urls) => h("div", { class: "pictures" }, ...urls.map((url, i) => h("img", { src: url, alt: `Image ${i + 1}` })));

// `known` waits for what the server runs and returns whether it said so, `reads` then tells whether the model reads
// images, `report` shows a sentence.
export class Attachments {
  constructor(reads, known, report) {
    this.reads = reads;
    this.known = known;
    this.report = report;
    this.urls = [];
    this.list = byId("attachments");
    this.button = byId("attach");
    this.button.append(icon("image"));
    const picker = byId("image-file");
    this.button.addEventListener("click", () => picker.click());
    picker.addEventListener("change", async () => {
      await this.add([...picker.files]);
      picker.value = "";
    });
    byId("input").addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])].filter(isImage);
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    const carries = (event) => [...(event.dataTransfer?.items ?? [])].some((item) => item.kind === "file");
    const over = (on) => document.body.classList.toggle("dropping", on);
    document.addEventListener("dragover", (event) => {
      if (!carries(event) || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      over(true);
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget || over(false));
    document.addEventListener("drop", (event) => {
      over(false);
      const files = [...(event.dataTransfer?.files ?? [])];
      if (!files.length || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      this.add(files);
    });
  }

  async add(files) {
    if (!(await this.known())) return;
    if (!this.reads()) {
      this.report("This model reads text only.");
      return;
    }
    this.report("");
    for (const file of files) {
      if (!isImage(file)) this.report(`${file.name} is not an image.`);
      else if (file.size > MOST_BYTES) this.report(`${file.name} is larger than ${MOST_BYTES >> 20} MiB.`);
      else {
        try {
          this.urls.push(await read(file));
        } catch {
          this.report(`${file.name} cannot be read as an image.`);
        }
      }
    }
    this.show();
    byId("input").focus();
  }

  // Return the images for a message and forget them.
  take() {
    const { urls } = this;
    this.urls = [];
    this.show();
    return urls;
  }

  show() {
    this.button.hidden = !this.reads();
    this.list.hidden = !this.urls.length;
    this.list.replaceChildren(...this.urls.map((url, i) => h("div", { class: "preview" }, h("img", { src: url, alt: `Image ${i + 1}` }),
      iconButton("close", `Remove image ${i + 1}`, () => {
        this.urls.splice(i, 1);
        this.show();
      }))));
  }
}

const isImage = (file) => file.type.startsWith("image/");
