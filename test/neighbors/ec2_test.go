//go:build e2e

package neighbors_test

import (
	"encoding/xml"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"sync"
	"testing"
)

const (
	region, zone, zoneID = "eu-central-1", "eu-central-1a", "euc1-az2"
	instanceType         = "m7i.large"
	clusterTag           = "kubernetes.io/cluster/test"
)

// instance is an EC2 instance with one network interface.
type instance struct {
	ID              string `xml:"instanceId"`
	State           string `xml:"instanceState>name"`
	Type            string `xml:"instanceType"`
	PrivateDNSName  string `xml:"privateDnsName"`
	Zone            string `xml:"placement>availabilityZone"`
	Tag             string `xml:"tagSet>item>key,omitempty"`
	InterfaceStatus string `xml:"networkInterfaceSet>item>status"`
	Address         string `xml:"networkInterfaceSet>item>privateIpAddressesSet>item>privateIpAddress"`
}

// newInstance returns a running instance of the cluster.
func newInstance(number int, address string) instance {
	return instance{
		ID: instanceID(number), State: "running", Type: instanceType, PrivateDNSName: privateDNSName(number), Zone: zone, Tag: clusterTag,
		InterfaceStatus: "in-use", Address: address,
	}
}

func instanceID(number int) string { return fmt.Sprintf("i-%017x", number) }

// hostname is the first label of privateDNSName, and the nodename by default.
func hostname(number int) string { return fmt.Sprintf("ip-10-0-0-%d", number) }

func privateDNSName(number int) string { return hostname(number) + "." + region + ".compute.internal" }

func providerID(number int) string { return fmt.Sprintf("aws:///%s/%s", zone, instanceID(number)) }

// ec2 is a fake of the actions of the EC2 API that concern Nodes
// (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html).
type ec2 struct {
	url string

	mu        sync.Mutex
	instances map[string]instance
	requests  int
}

func startEC2(t *testing.T) *ec2 {
	t.Helper()

	e := &ec2{instances: map[string]instance{}}
	server := httptest.NewServer(e)
	t.Cleanup(server.Close)

	e.url = server.URL

	return e
}

// set adds an instance or replaces it.
func (e *ec2) set(i instance) {
	e.mu.Lock()
	defer e.mu.Unlock()

	e.instances[i.ID] = i
}

// setState changes the state of an instance.
func (e *ec2) setState(number int, state string) {
	e.mu.Lock()
	defer e.mu.Unlock()

	i := e.instances[instanceID(number)]
	i.State = state
	e.instances[i.ID] = i
}

// remove removes an instance, as EC2 does about an hour after its termination.
func (e *ec2) remove(number int) {
	e.mu.Lock()
	defer e.mu.Unlock()

	delete(e.instances, instanceID(number))
}

// count returns the number of requests so far.
func (e *ec2) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()

	return e.requests
}

// response contains the elements of all responses.
type response struct {
	XMLName   xml.Name
	Instances []instance `xml:"reservationSet>item>instancesSet>item,omitempty"`
	ZoneName  string     `xml:"availabilityZoneInfo>item>zoneName,omitempty"`
	ZoneID    string     `xml:"availabilityZoneInfo>item>zoneId,omitempty"`
	Error     string     `xml:"Errors>Error>Code,omitempty"`
}

// ServeHTTP implements http.Handler.
func (e *ec2) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()

	e.requests++

	_ = r.ParseForm() // the form is then empty, which is an error below

	action := r.Form.Get("Action")
	answer := response{XMLName: xml.Name{Local: action + "Response"}}

	switch action {
	case "DescribeInstances":
		answer.Instances, answer.Error = e.describeInstances(r.Form)
	case "DescribeAvailabilityZones":
		answer.ZoneName, answer.ZoneID = zone, zoneID
	default: // such as DescribeInstanceTopology, which not all regions support
		answer.Error = "UnsupportedOperation"
	}

	if answer.Error != "" {
		answer.XMLName.Local = "Response"

		w.WriteHeader(http.StatusBadRequest)
	}

	_ = xml.NewEncoder(w).Encode(answer) // a client that has gone needs no answer
}

// describeInstances returns the instances that the parameters InstanceId.N and Filter.N select, or the code of an error.
func (e *ec2) describeInstances(form url.Values) (selected []instance, code string) {
	ids := values(form, "InstanceId")

	for _, id := range ids {
		if _, exists := e.instances[id]; !exists {
			return nil, "InvalidInstanceID.NotFound"
		}
	}

	for _, i := range e.instances {
		fields := map[string]string{"private-dns-name": i.PrivateDNSName, "instance-state-name": i.State}
		matches := len(ids) == 0 || slices.Contains(ids, i.ID)

		for n := 1; form.Has(fmt.Sprintf("Filter.%d.Name", n)); n++ {
			field, known := fields[form.Get(fmt.Sprintf("Filter.%d.Name", n))]
			if !known {
				return nil, "InvalidParameterValue"
			}

			matches = matches && slices.Contains(values(form, fmt.Sprintf("Filter.%d.Value", n)), field)
		}

		if matches {
			selected = append(selected, i)
		}
	}

	return selected, ""
}

// values returns the values of the parameters name.1, name.2 and so on.
func values(form url.Values, name string) (list []string) {
	for n := 1; form.Has(fmt.Sprintf("%s.%d", name, n)); n++ {
		list = append(list, form.Get(fmt.Sprintf("%s.%d", name, n)))
	}

	return list
}
