// Package chart contains only tests of the Helm chart: its RBAC is that of the extension, an API server accepts the
// rendered objects, and talos-ccm accepts its arguments.
package chart
