/* Search in pages that are opened from a folder.
 *
 * Browsers refuse to start a web worker from a `file:` page. This class runs the script of the worker in a hidden frame
 * instead. The theme's plugin "offline" otherwise fetches such a class from the internet.
 */
(function () {
  if (location.protocol !== "file:") return

  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inner = this.frame.contentWindow
      const base = new URL(url, location.href).href
      const load = source => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.src = new URL(source, base).href
        script.onload = resolve
        script.onerror = reject
        inner.document.body.appendChild(script)
      })
      // What the script calls to answer, and to load others; the theme awaits the latter.
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = (...sources) => sources.reduce((all, next) => all.then(() => load(next)), Promise.resolve())
      this.ready = load(base)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }

  window.Worker = FrameWorker
})()
