//go:build e2e && !ha

package e2e_test

// controlPlanes is the number of control-plane machines.
const controlPlanes = 1
