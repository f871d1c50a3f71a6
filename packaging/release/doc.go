// Package release contains only tests of the release process: the bldr files, the draft for the extensions catalog,
// the version numbers, the GitHub workflows and the commit check.
package release
