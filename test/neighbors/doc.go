// Package neighbors tests talos-ccm beside the cloud controller manager of AWS, which finds its instances in a fake of the
// EC2 API. The machines are simulated. Run the tests with `make neighbors`.
package neighbors
