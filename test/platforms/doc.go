// Package platforms tests talos-ccm with the code with which Talos reads the metadata of clouds. The tests have the build
// tag e2e and run as root.
package platforms
