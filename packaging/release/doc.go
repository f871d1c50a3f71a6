// Package release holds the tests of what a release is made with: the files for bldr, the draft for the catalog of extensions, the version in
// all its places, the workflows of the code host and the check of commits. It has no code of its own.
package release
