// Package chart contains only tests of the Helm chart: its RBAC equals the extension's, an API server accepts the
// rendered objects, and talos-ccm accepts its arguments.
package chart
