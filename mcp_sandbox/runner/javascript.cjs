// Loaded before code that comes on standard input as an ES module. What can run as CommonJS is
// taken away from there and run as that; an ES module finds `require` and the like beside `import`.
'use strict'
const fs = require('fs')
const Module = require('module')
const path = require('path')
const { compileFunction } = require('vm')
const { isMainThread } = require('worker_threads')

const GIVEN = ['exports', 'require', 'module', '__filename', '__dirname']
const main = new Module('.')
main.filename = path.resolve('[eval1]')
main.paths = Module._nodeModulePaths(process.cwd())

function read () {
  const bytes = Buffer.alloc(fs.fstatSync(0).size)
  // From a position: Node still finds it all.
  fs.readSync(0, bytes, 0, bytes.length, 0)
  return bytes.toString().replace(/^\uFEFF/, '').replace(/^#!/, '//')
}

function isCommonJs (code) {
  try {
    compileFunction(code, GIVEN)
    return true
  } catch {
    // An ES module, or an error that Node will show.
    return false
  }
}

if (isMainThread) {
  process.mainModule = main
  // Programs that this one starts get none of our options.
  process.execArgv = []
}
const code = isMainThread ? read() : null
if (code !== null && isCommonJs(code)) {
  fs.readFileSync(0)
  setImmediate(() => main._compile(code, main.filename))
} else {
  const values = [main.exports, Module.createRequire(main.filename), main, main.filename, process.cwd()]
  GIVEN.forEach((name, at) => { globalThis[name] = values[at] })
}
